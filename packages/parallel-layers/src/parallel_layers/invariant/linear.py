"""Column- and row-parallel products whose bits are the same at every size of the tensor-parallel group.

The backwards are the ordinary layers' own (`linear_ops`): those of the same context, whatever the forward computed.

Shape suffixes: T tokens, I input features, O output features, of which this rank has `I/tp` or `O/tp`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers import linear_ops
from parallel_layers.distributed import async_collectives
from parallel_layers.distributed.collectives import (
    copy_to_tensor_parallel,
    gather_from_tensor_parallel,
    scatter_to_tensor_parallel,
)
from parallel_layers.invariant.product import product, tree
from parallel_layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

ColumnLinear = ColumnParallelLinear | MergedColumnParallelLinear | QKVParallelLinear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)` whose rows and columns depend on nothing else: `[..., I]` -> `[..., O]`."""
    result: Tensor = _ColumnLinear.apply(x, weight, bias, _Column())
    return result


def column_forward(layer: ColumnLinear, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """A column-parallel layer's forward: `[T, ..., I]` (sequence parallel `[T/tp, ..., I]`) -> `[T, ..., O/tp]`."""
    weight = layer._given_weight(weight)
    sharded = async_collectives.is_sharded(layer.group)
    how = _Column(
        layer.group,
        gather=sharded and layer.sequence_parallel,
        reduce=sharded and layer.reduce_gradient,
        shared_rows=layer.shared_rows,
        output_dtype=layer.output_dtype,
        reduce_dtype=layer.reduce_dtype,
        main_grads=layer._main_grads(weight),
    )
    y: Tensor = _ColumnLinear.apply(x, weight, None if layer.defer_bias else layer.bias, how)
    return gather_from_tensor_parallel(y, layer.group) if getattr(layer, "gather_output", False) else y


def row_forward(layer: RowParallelLinear, blocks: int, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """A row-parallel layer's forward: `[T, ..., I/tp]` -> `[T, ..., O]` (sequence parallel `[T/tp, ..., O]`)."""
    if not layer.input_is_parallel:
        x = scatter_to_tensor_parallel(x, layer.group)
    weight = layer._given_weight(weight)
    how = _Row(
        layer.group if async_collectives.is_sharded(layer.group) else None,
        layer.sequence_parallel,
        blocks,
        layer.output_dtype,
        layer._main_grads(weight),
    )
    y: Tensor = _RowLinear.apply(x, weight, None if layer.defer_bias else layer.bias, how)
    return y


def replicated_forward(layer: Any, x: Tensor) -> Tensor:
    """A linear that is whole on every rank: `[T', I]` -> `[T', O]`; `layer.group`: where its tokens are divided."""
    bias = None if layer.bias is None else copy_to_tensor_parallel(layer.bias, layer.group)
    return linear(x, copy_to_tensor_parallel(layer.weight, layer.group), bias)


class _Column(NamedTuple):
    """What a column-parallel product is told; see `linear_ops.column_parallel_linear`."""

    group: ProcessGroup | None = None
    gather: bool = False
    reduce: bool = False
    shared_rows: tuple[int, int] | None = None
    output_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None)


class _Row(NamedTuple):
    """What a row-parallel product is told; `group` is None where there is nobody to communicate with."""

    group: ProcessGroup | None
    sequence_parallel: bool
    blocks: int
    output_dtype: torch.dtype | None
    main_grads: tuple[Tensor | None, Tensor | None]


class _ColumnLinear(torch.autograd.Function):
    """The ordinary communication; every element of the product depends on its own row and column."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: _Column) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.group, ctx.gather, ctx.reduce, ctx.shared_rows = how.group, how.gather, how.reduce, how.shared_rows
        ctx.main_grads = how.main_grads
        ctx.how = "serial"  # the backward, by whole collectives
        ctx.reduce_dtype = async_collectives.sum_dtype(weight, how.reduce_dtype) if how.reduce else None
        if how.gather:
            assert how.group is not None
            x = async_collectives.all_gather(x, how.group)
        return product(x, weight, bias, dtype=how.output_dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *linear_ops._ColumnLinear.backward(ctx, dy)[:3], None


class _RowLinear(torch.autograd.Function):
    """`blocks` parts of the contraction, each summed by itself and all of them as one tree, whoever holds them.

    Each rank has the sum of a subtree, in fp32. These are exchanged by an all-to-all, after which each rank has the
    parts of its share of the tokens and adds them up in order of rank. Without sequence parallelism the results,
    rounded to the output's dtype, are gathered. Sent: `(tp - 1) / tp` of `[T, O]` in fp32, and as much in the output's
    dtype; no more than an all-reduce in fp32 sends.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: _Row) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.group, ctx.sequence_parallel, ctx.main_grads = how.group, how.sequence_parallel, how.main_grads
        ctx.how = "serial"  # the gather of dy, before the product with it
        dtype = x.dtype if how.output_dtype is None else how.output_dtype
        if how.group is None:
            return product(x, weight, bias, leaves=how.blocks, in_tree=True, dtype=dtype)
        leaves = how.blocks // how.group.size()
        part = product(x, weight, leaves=leaves, in_tree=True, dtype=torch.float32)
        return _sum_over_ranks(part, bias, how.group, how.sequence_parallel, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *linear_ops._RowLinear.backward(ctx, dy)[:3], None


def _sum_over_ranks(
    part: Tensor, bias: Tensor | None, group: ProcessGroup, sequence_parallel: bool, dtype: torch.dtype
) -> Tensor:
    """The tree over ranks of `[T, ..., O]` fp32, plus the bias, in `dtype`; sequence parallel: this rank's tokens."""
    size, tokens = group.size(), part.shape[0]
    if sequence_parallel:
        async_collectives.check_divisible(part, 0, group)
    else:
        part = F.pad(part, (0, 0) * (part.dim() - 1) + (0, -tokens % size))
    own = part.shape[0] // size
    arrived = async_collectives.wait(async_collectives.start_all_to_all(part, group, [own] * size, [own] * size))
    y = tree(arrived.chunk(size) if own else [part])
    y = (y if bias is None else y + bias.float()).to(dtype)
    return y if sequence_parallel else async_collectives.all_gather(y, group)[:tokens]
