"""The head in tiles of plain torch, for every device; the reference for the CUDA kernels of `fused`.

`head_statistics` walks the vocabulary and keeps four numbers a token. `head_gradients` recomputes the logits one slice
of the vocabulary at a time. Temporaries have at most `TILE_ELEMENTS` elements, except one copy of the hidden states in
the dtype of the GEMMs.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from parallel_layers.autocast import wide
from parallel_layers.head.softmax_statistics import (
    LogitTransform,
    UpstreamGradients,
    logit_gradient,
    merge_statistics,
    tile_statistics,
)

TILE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 25}
"""Largest temporary of a tile, in elements, by device type; other devices take the CUDA value."""

_VOCABULARY_SLICE = 8192


def runs(length: int, step: int) -> Iterator[slice]:
    """Cut `length` rows into runs of at most `step`; at least one run, which may be empty."""
    for start in range(0, max(length, 1), step):
        yield slice(start, start + step)


def _tile_shape(hidden_TH: Tensor, num_entries: int) -> tuple[int, int]:
    """Return `(tokens, vocabulary entries)` of a tile: logits and weight within the limit of the device."""
    limit = TILE_ELEMENTS.get(hidden_TH.device.type, TILE_ELEMENTS["cuda"])
    num_tokens, hidden_size = hidden_TH.shape
    entries = max(1, min(num_entries, _VOCABULARY_SLICE, limit // max(hidden_size, 1)))
    return max(1, min(num_tokens, limit // entries)), entries


def _operand_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of GEMM operands: bf16 where a GEMM can return fp32, else at least fp32.

    fp16 is widened on every device, because gradients of logits underflow in fp16.
    """
    return x.dtype if x.is_cuda and x.dtype == torch.bfloat16 else wide(x.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    dtype = wide(a.dtype)
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
    tokens_a_tile, entries_a_tile = _tile_shape(hidden_TH, len(weight_VH))
    hidden = hidden_TH.to(dtype)
    merged: Tensor | None = None
    for entries in runs(len(weight_VH), entries_a_tile):
        weight = weight_VH[entries].to(dtype)
        parts = []
        for tokens in runs(len(hidden), tokens_a_tile):
            logits, _ = transform.apply_(_product(hidden[tokens], weight.T), tokens)
            parts.append(tile_statistics(logits, labels_T[tokens] - entries.start))
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
    hidden_done: Callable[[], None] = lambda: None,
) -> None:
    """Add this rank's part of the hidden states' gradient to `grad_hidden_TH` (fp32), and write `grad_weight_VH`.

    A gradient that is None is not computed. `hidden_done` is called once `grad_hidden_TH` is complete, so that its
    communication can overlap with the rest.
    """
    dtype = _operand_dtype(hidden_TH)
    tokens_a_tile, entries_a_tile = _tile_shape(hidden_TH, len(weight_VH))
    hidden = hidden_TH.to(dtype)
    for entries in runs(len(weight_VH), entries_a_tile):
        weight = weight_VH[entries].to(dtype)
        grad_weight = None if grad_weight_VH is None else torch.zeros_like(weight, dtype=wide(dtype))
        for tokens in runs(len(hidden), tokens_a_tile):
            logits, derivative = transform.apply_(_product(hidden[tokens], weight.T), tokens)
            labels = labels_T[tokens] - entries.start
            gradient = logit_gradient(logits, labels, upstream, tokens).mul_(derivative).to(dtype)
            if grad_hidden_TH is not None:
                _add_product_(grad_hidden_TH[tokens], gradient, weight)
            if grad_weight is not None:
                _add_product_(grad_weight, gradient.T, hidden[tokens])
        if grad_weight_VH is not None and grad_weight is not None:
            grad_weight_VH[entries].copy_(grad_weight)
    hidden_done()
