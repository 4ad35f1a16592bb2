"""The head in tiles of plain torch, for every device; the reference for the CUDA kernels.

`head_statistics` walks the vocabulary and keeps four numbers a token. `head_gradients` recomputes the logits one slice
of the vocabulary at a time. Temporaries have at most `TILE_ELEMENTS` elements, except one fp32 copy of the hidden
states.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from parallel_layers.head.logit_transform import LogitTransform
from parallel_layers.head.softmax_statistics import UpstreamGradients, logit_gradient, merge_statistics, tile_statistics

TILE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 25}
"""Largest temporary of a tile, in elements, by device type; other devices take the CUDA value."""

_VOCABULARY_SLICE = 8192


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and sums: fp32, and fp64 for fp64 inputs (gradient checks)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tile_shape(num_tokens: int, num_entries: int, hidden_size: int, limit: int) -> tuple[int, int]:
    """Return `(tokens, vocabulary entries)` of a tile of at most `limit` logits and `limit` elements of the weight."""
    entries = max(1, min(num_entries, _VOCABULARY_SLICE, limit // max(hidden_size, 1)))
    return max(1, min(num_tokens, limit // entries)), entries


def _limit(x: Tensor) -> int:
    return TILE_ELEMENTS.get(x.device.type, TILE_ELEMENTS["cuda"])


def _operand_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of GEMM operands: bf16 where a GEMM can return fp32, else the dtype of the sums.

    fp16 is widened on every device, because gradients of logits underflow in fp16.
    """
    return x.dtype if x.is_cuda and x.dtype == torch.bfloat16 else accumulation_dtype(x.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    dtype = accumulation_dtype(a.dtype)
    return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)


def _add_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def head_statistics(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, transform: LogitTransform) -> Tensor:
    """Return the statistics `[4, T]` of this rank's logits; `labels_T` counts from this rank's first entry.

    `softmax_statistics` defines the statistics.
    """
    dtype = _operand_dtype(hidden_TH)
    num_tokens, num_entries = len(hidden_TH), len(weight_VH)
    tokens_a_tile, entries_a_tile = tile_shape(num_tokens, num_entries, hidden_TH.shape[1], _limit(hidden_TH))
    hidden = hidden_TH.to(dtype)
    merged: Tensor | None = None
    for first in range(0, max(num_entries, 1), entries_a_tile):
        weight = weight_VH[first : first + entries_a_tile].to(dtype)
        parts = []
        for start in range(0, max(num_tokens, 1), tokens_a_tile):
            tokens = slice(start, start + tokens_a_tile)
            logits, _ = transform.apply_(_product(hidden[tokens], weight.T), tokens)
            parts.append(tile_statistics(logits, labels_T[tokens] - first))
        tile = torch.cat(parts, dim=1)
        merged = tile if merged is None else merge_statistics(torch.stack((merged, tile)))
    assert merged is not None
    return merged


def head_gradients(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    transform: LogitTransform,
    upstream: UpstreamGradients,
    *,
    grad_hidden_TH: Tensor | None,
    grad_weight_VH: Tensor | None,
    accumulate_weight: bool = False,
    hidden_done: Callable[[], None] = lambda: None,
) -> None:
    """Add this rank's part of the hidden states' gradient to `grad_hidden_TH` (fp32), and write `grad_weight_VH`.

    A gradient that is None is not computed. With `accumulate_weight` the weight's gradient is added to `grad_weight_VH`
    (fp32). `hidden_done` is called once `grad_hidden_TH` is complete, so that its communication can overlap with the
    rest.
    """
    dtype = _operand_dtype(hidden_TH)
    num_tokens, num_entries = len(hidden_TH), len(weight_VH)
    tokens_a_tile, entries_a_tile = tile_shape(num_tokens, num_entries, hidden_TH.shape[1], _limit(hidden_TH))
    hidden = hidden_TH.to(dtype)
    for first in range(0, num_entries, entries_a_tile):
        entries = slice(first, first + entries_a_tile)
        weight = weight_VH[entries].to(dtype)
        grad_weight = torch.zeros_like(weight, dtype=accumulation_dtype(dtype)) if grad_weight_VH is not None else None
        for start in range(0, num_tokens, tokens_a_tile):
            tokens = slice(start, start + tokens_a_tile)
            logits, derivative = transform.apply_(_product(hidden[tokens], weight.T), tokens)
            gradient = logit_gradient(logits, labels_T[tokens] - first, upstream, tokens).mul_(derivative).to(dtype)
            if grad_hidden_TH is not None:
                _add_product_(grad_hidden_TH[tokens], gradient, weight)
            if grad_weight is not None:
                _add_product_(grad_weight, gradient.T, hidden[tokens])
        if grad_weight_VH is not None and grad_weight is not None:
            if accumulate_weight:
                grad_weight_VH[entries].add_(grad_weight)
            else:
                grad_weight_VH[entries].copy_(grad_weight)
    hidden_done()
