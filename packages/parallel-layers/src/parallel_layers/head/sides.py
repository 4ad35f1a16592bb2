"""A head's hidden states and rows, the tiles of its logits, and its gradients: the base of distillation.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.head.chunked import LogitTransform, _add_product_, _operand_dtype, _product, runs, tile_shape
from parallel_layers.head.vocabulary import gather_rows
from parallel_layers.kernels.runtime import device_type
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
    """The logits of some tokens and entries, in fp32 (fp64 for a student in fp64)."""

    tokens: slice
    entries: slice
    logits: list[Tensor]
    """Of each side."""
    derivative: Tensor | float
    """Of the last side's logits by its raw dot products."""
    operands: tuple[Tensor, Tensor]
    """The last side's hidden states and rows, in the dtype of the GEMMs."""


def tiles_of(sides: Sequence[Side]) -> Iterator[Tile]:
    """Yield the tiles of sides over the same tokens and entries, the student last; entries in the outer loop."""
    first = sides[-1]
    (num_tokens, _), dtype, device = first.hidden_TH.shape, wide(first.hidden_TH.dtype), first.hidden_TH.device
    hidden_size = max(side.hidden_TH.shape[1] for side in sides)
    tokens_a_tile, entries_a_tile = tile_shape(num_tokens, len(first.weight_VH), hidden_size, device_type(device))
    dtypes = [_operand_dtype(side.hidden_TH) for side in sides]
    states = [side.hidden_TH.to(operand) for side, operand in zip(sides, dtypes, strict=True)]
    for entries in runs(len(first.weight_VH), entries_a_tile):
        weights = [side.weight_VH[entries].to(operand) for side, operand in zip(sides, dtypes, strict=True)]
        for tokens in runs(num_tokens, tokens_a_tile):
            logits: list[Tensor] = []
            derivative: Tensor | float = 1.0
            for side, hidden, weight in zip(sides, states, weights, strict=True):
                tile, derivative = side.transform.apply_(_product(hidden[tokens], weight.T), tokens)
                logits.append(tile.to(dtype))
            yield Tile(tokens, entries, logits, derivative, (hidden[tokens], weight))


class Gradients(NamedTuple):
    """Where the gradients of a head's hidden states and rows are added; None: not computed."""

    hidden_TH: Tensor | None
    """In fp32 (fp64)."""
    weight_VH: Tensor | None


def add_gradients(sides: Sequence[Side], gradient: Callable[[Tile], Tensor], out: Gradients) -> None:
    """Add the gradients of the last side, given the gradient of its logits in each tile; each entry is rounded once."""
    weight_sums: Tensor | None = None
    for tile in tiles_of(sides):
        hidden, weight = tile.operands
        gradient_TV = gradient(tile).mul_(tile.derivative).to(weight.dtype)
        if out.hidden_TH is not None:
            _add_product_(out.hidden_TH[tile.tokens], gradient_TV, weight)
        if out.weight_VH is None:
            continue
        if weight_sums is None or tile.tokens.start == 0:
            weight_sums = torch.zeros_like(weight, dtype=wide(weight.dtype))
        _add_product_(weight_sums, gradient_TV.T, hidden)
        if tile.tokens.stop >= len(sides[-1].hidden_TH):
            out.weight_VH[tile.entries].add_(weight_sums)


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
