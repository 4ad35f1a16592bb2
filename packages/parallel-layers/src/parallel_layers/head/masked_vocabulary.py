"""Log-probabilities within a few given tokens: the head's logits of these tokens alone.

Shape suffixes: T tokens, H hidden, V this rank's rows of the head, K given tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed.collectives import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
)
from parallel_layers.head.chunked import TILE_ELEMENTS, LogitTransform, runs
from parallel_layers.head.vocabulary import IGNORE_INDEX, vocab_range
from parallel_layers.kernels.runtime import device_type
from parallel_layers.module.autocast import wide, without_autocast


def masked_logits(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    ids_TK: Tensor,
    *,
    group: ProcessGroup | None,
    vocab_size: int,
    sequence_parallel: bool,
    transform: LogitTransform,
) -> Tensor:
    """Return the logits `[T, K]` fp32 of the given tokens of each row, -inf for ids of -1; 0 in rows of -1 alone.

    Each rank multiplies the hidden states with its own rows of the head. Forward: all-reduce of the logits. Backward:
    all-reduce of the hidden states' gradient; sequence parallel: all-gather and reduce-scatter.
    """
    hidden_TH = (gather_from_sequence_parallel if sequence_parallel else copy_to_tensor_parallel)(hidden_TH, group)
    begin, end = vocab_range(vocab_size, group, len(weight_VH))
    is_local = (ids_TK >= begin) & (ids_TK < end)
    raw_TK: Tensor = _Products.apply(hidden_TH, weight_VH, torch.where(is_local, ids_TK.long() - begin, -1))
    raw_TK = reduce_from_tensor_parallel(raw_TK, group)
    scale, softcap, temperature = transform
    logits_TK = softcap * (raw_TK * (scale / softcap)).tanh() if softcap else raw_TK * scale
    logits_TK = logits_TK / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    in_mask = ids_TK >= 0
    return logits_TK.masked_fill(~in_mask & in_mask.any(dim=1, keepdim=True), -torch.inf)


def mask_columns(labels_T: Tensor, ids_TK: Tensor) -> Tensor:
    """Return the column of each label in its row, `IGNORE_INDEX` for labels outside."""
    matches = ids_TK == labels_T[:, None]
    return torch.where(matches.any(dim=1), matches.int().argmax(dim=1), IGNORE_INDEX)


class _Products(torch.autograd.Function):
    """Multiply each hidden state with K rows of the head: `hidden_t . weight_{rows[t, k]}`, 0 for a row of -1.

    Rows of the head are gathered a tile of tokens at a time, in the forward and again in the backward. Sums are fp32.
    """

    @staticmethod
    @without_autocast
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, rows_TK: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_VH, rows_TK)
        tiles = _tiles(hidden_TH, weight_VH, rows_TK)
        tiles_of_logits = [torch.bmm(weights, hidden[:, :, None])[..., 0] for _, hidden, weights in tiles]
        return torch.cat(tiles_of_logits).masked_fill(rows_TK < 0, 0.0)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden_TH, weight_VH, rows_TK = ctx.saved_tensors
        grad_TK = grad_TK.masked_fill(rows_TK < 0, 0.0)
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden_TH, dtype=grad_TK.dtype) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=grad_TK.dtype) if needs_weight else None
        for tokens, hidden, weights in _tiles(hidden_TH, weight_VH, rows_TK):
            if grad_hidden is not None:
                grad_hidden[tokens] = torch.bmm(grad_TK[tokens, None], weights)[:, 0]
            if grad_weight is not None:
                outer = grad_TK[tokens, :, None] * hidden[:, None]
                grad_weight.index_add_(0, rows_TK[tokens].clamp(min=0).flatten(), outer.flatten(0, 1))
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_TH.dtype),
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            None,
        )


def _tiles(hidden_TH: Tensor, weight_VH: Tensor, rows_TK: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield some tokens, their hidden states `[t, H]`, and their rows of the head `[t, K, H]`, in fp32."""
    dtype = wide(hidden_TH.dtype)
    limit = TILE_ELEMENTS.get(device_type(hidden_TH.device), TILE_ELEMENTS["cuda"])
    for tokens in runs(len(hidden_TH), max(1, limit // max(1, rows_TK.shape[1] * hidden_TH.shape[1]))):
        yield tokens, hidden_TH[tokens].to(dtype), weight_VH[rows_TK[tokens].clamp(min=0)].to(dtype)
