"""A head's hidden states and rows, the tiles of its logits, and its gradients: the base of distillation.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.device.names import GPU
from parallel_layers.distributed import async_collectives
from parallel_layers.head.chunked import (
    TILE_ELEMENTS,
    LogitTransform,
    operand_dtype,
    runs,
)
from parallel_layers.head.vocabulary import gather_rows
from parallel_layers.kernels.runtime import device_type
from parallel_layers.linear.products import add_product_, multiply_into
from parallel_layers.module.autocast import wide


class Side(NamedTuple):
    """Hidden states `[T, H]`, rows of a head `[V, H]`, and the transform of their products into logits."""

    hidden_TH: Tensor
    weight_VH: Tensor
    transform: LogitTransform


class Pair(NamedTuple):
    """A teacher and a student over the same tokens and the same entries of the vocabulary."""

    teacher: Side
    student: Side


class Tile(NamedTuple):
    """The raw products of some tokens and entries."""

    tokens: slice
    entries: slice
    products: tuple[Tensor, ...]
    """The logits `[t, v]` of each side before scaling, fp32 (fp64 for a student in fp64). The next tile reuses them."""
    operands: tuple[Tensor, Tensor]
    """The last side's hidden states and rows, in the dtype of the GEMMs."""

    def logits(self, sides: Sequence[Side]) -> tuple[list[Tensor], Tensor | float]:
        """Turn the products into logits, in place; return them, and the derivative of the last side's."""
        pairs = [
            side.transform.apply_(x, self.tokens) for side, x in zip(sides, self.products, strict=True)
        ]  # fmt: skip
        return [logits for logits, _ in pairs], pairs[-1][1]


def tiles_of(sides: Sequence[Side], *, rows_of_rank: int | None = None) -> Iterator[Tile]:
    """Yield the tiles of sides over the same tokens and entries, the student last; entries in the outer loop.

    With `rows_of_rank`, the rows of each rank with their padding, a tile has all entries of some tokens, and all ranks
    have equally many tiles.
    """
    student = sides[-1]
    (num_tokens, _), num_entries, dtype = student.hidden_TH.shape, len(student.weight_VH), wide(student.hidden_TH.dtype)
    tokens_a_tile, entries_a_tile = _tile_shape(sides, rows_of_rank)
    dtypes = [operand_dtype(side.hidden_TH) for side in sides]
    states = [side.hidden_TH.to(operand) for side, operand in zip(sides, dtypes, strict=True)]
    buffers = [states[-1].new_empty(tokens_a_tile * entries_a_tile, dtype=dtype) for _ in sides]
    for entries in runs(num_entries, entries_a_tile):
        weights = [side.weight_VH[entries].to(operand) for side, operand in zip(sides, dtypes, strict=True)]
        for tokens in runs(num_tokens, tokens_a_tile):
            operands = [(hidden[tokens], weight) for hidden, weight in zip(states, weights, strict=True)]
            shape = len(operands[-1][0]), len(weights[-1])
            products = tuple(buffer[: math.prod(shape)].view(shape) for buffer in buffers)
            for out, (hidden, weight) in zip(products, operands, strict=True):
                multiply_into(out, hidden, weight, None)
            yield Tile(tokens, entries, products, operands[-1])


def _tile_shape(sides: Sequence[Side], rows_of_rank: int | None) -> tuple[int, int]:
    """Return `(tokens, entries)` of a tile: all tokens, or 16 times as many tokens as entries; or whole rows.

    The products of a side, and its rows, have at most half the elements of a tile of `chunked`; whole rows as many.
    """
    (num_tokens, _), num_entries = sides[-1].hidden_TH.shape, len(sides[-1].weight_VH)
    limit = TILE_ELEMENTS.get(device_type(sides[-1].hidden_TH.device), TILE_ELEMENTS[GPU])
    if rows_of_rank is not None:
        tokens = max(1, min(num_tokens, limit // rows_of_rank))
        # cuBLAS has tiles of 128 tokens.
        return tokens if tokens < 128 else tokens // 128 * 128, max(1, num_entries)
    limit //= 2
    entries = max(limit // max(num_tokens, 1), math.isqrt(limit // 16))
    entries = max(1, min(num_entries, entries, limit // max(side.hidden_TH.shape[1] for side in sides)))
    # cuBLAS has tiles of 256 entries.
    entries = entries if entries < 256 else entries // 256 * 256
    return max(1, min(num_tokens, limit // entries)), entries


class Gradients(NamedTuple):
    """The tensors to which the gradients of a head's hidden states and rows are added; None: not computed."""

    hidden_TH: Tensor | None
    """In fp32 (fp64)."""
    weight_VH: Tensor | None


def add_gradients(sides: Sequence[Side], gradient: Callable[[Tile], Tensor], out: Gradients) -> None:
    """Add the gradients of the last side, given the gradient of its products in each tile; rows are rounded once."""
    num_tokens, sums = len(sides[-1].hidden_TH), None
    for tile in tiles_of(sides):
        hidden, weight = tile.operands
        gradient_TV = gradient(tile).to(weight.dtype)
        if out.hidden_TH is not None:
            add_product_(out.hidden_TH[tile.tokens], gradient_TV, weight.T)
        if out.weight_VH is None:
            continue
        # A head has rows for padding behind the last entry.
        rows, is_last = out.weight_VH[tile.entries][: len(weight)], tile.tokens.stop >= num_tokens
        if tile.tokens.start == 0:
            rounds = not is_last or rows.dtype not in (weight.dtype, wide(weight.dtype))
            sums = torch.zeros_like(weight, dtype=wide(weight.dtype)) if rounds else None
        add_product_(rows if sums is None else sums, gradient_TV.T, hidden.T)
        if sums is not None and is_last:
            rows.add_(sums)


class HeadGradients:
    """The gradients of a sharded head in a backward: `ctx` has `destination`, and the first inputs are the head's."""

    def __init__(self, ctx: Any, hidden_TH: Tensor, weight_VH: Tensor) -> None:
        needs_hidden, needs_weight, *self.further = ctx.needs_input_grad
        dtype = wide(hidden_TH.dtype)
        hidden, weight, self.sum = None, None, ctx.destination.sum if needs_weight else None
        if needs_hidden:
            hidden = torch.zeros_like(hidden_TH, dtype=dtype, memory_format=torch.contiguous_format)
        if needs_weight:
            weight = self.sum
            if weight is None:
                weight = weight_VH.new_zeros(weight_VH.shape, dtype=ctx.destination.dtype)
        self.out = Gradients(hidden, weight)

    def of_inputs(
        self, dtype: torch.dtype, group: ProcessGroup | None, sequence_parallel: bool
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs, summed over the ranks; None for what the backward has added itself."""
        hidden, weight = self.out
        if hidden is not None and async_collectives.is_sharded(group):
            reduce = async_collectives.reduce_scatter if sequence_parallel else async_collectives.all_reduce
            hidden = reduce(hidden, group)
        return (
            None if hidden is None else hidden.to(dtype),
            None if self.sum is not None else weight,
            *(None for _ in self.further),
        )


def whole_tokens(hidden_TH: Tensor, group: ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """Return the hidden states of all tokens."""
    return gather_rows(hidden_TH, group) if sequence_parallel else hidden_TH
