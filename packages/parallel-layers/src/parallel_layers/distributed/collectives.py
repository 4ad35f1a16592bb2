"""Differentiable collectives: each is a linear map, and its backward is the conjugate map.

    function                              forward                   backward
    copy_to_tensor_parallel               identity                  all-reduce
    reduce_from_tensor_parallel           all-reduce                identity
    scatter_to_tensor_parallel            split last dim            all-gather last dim
    gather_from_tensor_parallel           all-gather last dim       split last dim (reduce_gradient: reduce-scatter)
    reduce_scatter_to_tensor_parallel     reduce-scatter last dim   all-gather last dim
    scatter_to_sequence_parallel          split dim 0               all-gather dim 0
    gather_from_sequence_parallel         all-gather dim 0          reduce-scatter dim 0 (or split)
    reduce_scatter_to_sequence_parallel   reduce-scatter dim 0      all-gather dim 0
    all_to_all                            all-to-all                all-to-all the other way

If every rank computes the same function of a gathered or reduced tensor, the ranks' gradients are equal and complete,
and the backward splits or does nothing. If each rank computes a part (its columns, its tokens), each gradient is a
part, and the backward sums. torch's own differentiable collectives always sum in the backward, which counts a
replicated loss once for each rank.

Common to all functions:

- The result is a new tensor, or the input itself if the group is None or has one rank. Inputs and gradients are never
  changed. Tensors may be non-contiguous or empty and have any number of dims.
- They can be differentiated twice, and torch.compile traces them.
- Parts are equal unless `sizes` gives the units of the dim on each rank. A size that does not divide raises ValueError.
- Every rank must pass the same `sizes`, and without `sizes` tensors of the same shape. A check would need communication
  of its own, so there is none; gloo and NCCL fail in their own ways.
- Sums over the ranks are taken in `reduce_dtype`, by default at least fp32, and rounded to the tensor's dtype at the
  end.

Sources: Megatron-LM (https://arxiv.org/abs/1909.08053) and its sequence parallelism (https://arxiv.org/abs/2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives


def copy_to_tensor_parallel(
    x: Tensor, group: ProcessGroup | None, *, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Return `x`, from which each rank then computes a part of the result.

    Forward: identity. Backward: all-reduce, because each rank's gradient is a part of the sum.
    """
    return _Copy.apply(x, group, reduce_dtype) if async_collectives.is_sharded(group) else x


def reduce_from_tensor_parallel(
    x: Tensor, group: ProcessGroup | None, *, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Sum partial results over the ranks.

    Forward: all-reduce. Backward: identity.
    """
    return _Reduce.apply(x, group, reduce_dtype) if async_collectives.is_sharded(group) else x


def scatter_to_tensor_parallel(x: Tensor, group: ProcessGroup | None, *, sizes: Sequence[int] | None = None) -> Tensor:
    """Keep this rank's part of the last dim of a replicated `x`: `[..., H]` -> `[..., H/tp]` or `[..., sizes[rank]]`.

    Forward: split, no communication. Backward: all-gather.

    Raises:
        ValueError: H does not divide by the group's size, or `sizes` does not add up to H.
    """
    return _split(x, group, x.dim() - 1, sizes)


def gather_from_tensor_parallel(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    reduce_gradient: bool = False,
    reduce_dtype: torch.dtype | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Concatenate the ranks' last dims: `[..., H/tp]` or `[..., sizes[rank]]` -> `[..., H]`.

    Forward: all-gather. Backward: split; with `reduce_gradient` (ranks compute different parts from the gathered
    tensor) reduce-scatter.

    Raises:
        ValueError: `sizes[rank]` differs from the last dim of `x`.
    """
    return _gather(x, group, x.dim() - 1, reduce_gradient, reduce_dtype, sizes)


def reduce_scatter_to_tensor_parallel(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    reduce_dtype: torch.dtype | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sum the ranks' `[..., H]` and keep this rank's part of the last dim: `[..., H/tp]` or `[..., sizes[rank]]`.

    Forward: reduce-scatter. Backward: all-gather. Raises ValueError as `scatter_to_tensor_parallel` does.
    """
    return _reduce_scatter(x, group, x.dim() - 1, reduce_dtype, sizes)


def scatter_to_sequence_parallel(
    x: Tensor, group: ProcessGroup | None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Keep this rank's tokens of a replicated `x`: `[T, ...]` -> `[T/tp, ...]` or `[sizes[rank], ...]`.

    Forward: split, no communication. Backward: all-gather.

    Raises:
        ValueError: T does not divide by the group's size, or `sizes` does not add up to T.
    """
    return _split(x, group, 0, sizes)


def gather_from_sequence_parallel(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    reduce_gradient: bool = True,
    reduce_dtype: torch.dtype | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Concatenate the ranks' tokens: `[T/tp, ...]` or `[sizes[rank], ...]` -> `[T, ...]`.

    Forward: all-gather. Backward: reduce-scatter; with `reduce_gradient=False` (all ranks compute the same from the
    gathered tensor) split.

    Raises:
        ValueError: `sizes[rank]` differs from dim 0 of `x`.
    """
    return _gather(x, group, 0, reduce_gradient, reduce_dtype, sizes)


def reduce_scatter_to_sequence_parallel(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    reduce_dtype: torch.dtype | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sum the ranks' partial `[T, ...]` and keep this rank's tokens: `[T/tp, ...]` or `[sizes[rank], ...]`.

    Forward: reduce-scatter. Backward: all-gather. Raises ValueError as `scatter_to_sequence_parallel` does.
    """
    return _reduce_scatter(x, group, 0, reduce_dtype, sizes)


def all_to_all(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    split_dim: int = 0,
    concat_dim: int = 0,
    input_sizes: Sequence[int] | None = None,
    output_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Cut `x` along `split_dim`, send part r to rank r, and concatenate the received parts along `concat_dim`.

    `split_dim=1, concat_dim=0` turns some tokens and all heads into all tokens and some heads, `[T/n, H]` -> `[T, H/n]`
    on n ranks; `split_dim=0, concat_dim=1` is the way back. With both 0, experts exchange rows.

    Args:
        x: The tensor to exchange.
        group: The ranks; None returns `x`.
        split_dim: The dim to cut.
        concat_dim: The dim to concatenate along.
        input_sizes: Units of `split_dim` for each rank (default: equal parts). If the two dims differ, `input_sizes`
        must
            be the same on all ranks.
        output_sizes: Units of `concat_dim` from each rank. Default: `input_sizes`, or if the dims differ this rank's
            size of `concat_dim` from every rank.

    Forward: all-to-all. Backward: all-to-all in the other direction.

    Raises:
        ValueError: `split_dim` does not divide by the group's size and no sizes are given, or sizes do not add up.
    """
    split_dim, concat_dim = split_dim % x.dim(), concat_dim % x.dim()
    if group is None or group.size() == 1:
        return x
    size = group.size()
    if input_sizes is None:
        async_collectives.check_divisible(x, split_dim, group)
        input_sizes = [x.shape[split_dim] // size] * size
    if output_sizes is None:
        output_sizes = input_sizes if split_dim == concat_dim else [x.shape[concat_dim]] * size
    fits = len(input_sizes) == len(output_sizes) == size and sum(input_sizes) == x.shape[split_dim]
    if not fits or min(*input_sizes, *output_sizes) < 0:
        raise ValueError(
            f"input_sizes={list(input_sizes)} and output_sizes={list(output_sizes)} must have one entry for each of "
            f"{size} ranks, none below 0, and input_sizes must add up to {x.shape[split_dim]} (dim {split_dim} of "
            f"{tuple(x.shape)})"
        )
    if split_dim != concat_dim and output_sizes[group.rank()] != x.shape[concat_dim]:
        raise ValueError(
            f"output_sizes={list(output_sizes)} must state this rank's own {x.shape[concat_dim]} (dim {concat_dim} of "
            f"{tuple(x.shape)}) at index {group.rank()}"
        )
    return _AllToAll.apply(x, group, split_dim, concat_dim, tuple(input_sizes), tuple(output_sizes))


_Sizes = tuple[int, ...] | None


def _split(x: Tensor, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None) -> Tensor:
    if not async_collectives.is_sharded(group):
        return x
    return _Split.apply(x, group, dim, _sizes_of_parts(x, group, dim, sizes))


def _reduce_scatter(
    x: Tensor, group: ProcessGroup | None, dim: int, reduce_dtype: torch.dtype | None, sizes: Sequence[int] | None
) -> Tensor:
    if not async_collectives.is_sharded(group):
        return x
    return _ReduceScatter.apply(x, group, dim, reduce_dtype, _sizes_of_parts(x, group, dim, sizes))


def _gather(
    x: Tensor,
    group: ProcessGroup | None,
    dim: int,
    reduce_gradient: bool,
    reduce_dtype: torch.dtype | None,
    sizes: Sequence[int] | None,
) -> Tensor:
    if not async_collectives.is_sharded(group):
        return x
    assert group is not None
    checked = _one_for_each_rank(sizes, group)
    if checked is not None and checked[group.rank()] != x.shape[dim]:
        raise ValueError(
            f"sizes={list(checked)} must state this rank's own {x.shape[dim]} (dim {dim} of {tuple(x.shape)}) at index "
            f"{group.rank()}"
        )
    if reduce_gradient:
        return _GatherPart.apply(x, group, dim, reduce_dtype, checked)
    return _Gather.apply(x, group, dim, checked)


def _sizes_of_parts(x: Tensor, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None) -> _Sizes:
    """Return `sizes` as a tuple after checking it against dim `dim` of `x`."""
    assert group is not None
    checked = _one_for_each_rank(sizes, group)
    if checked is not None and sum(checked) != x.shape[dim]:
        raise ValueError(f"sizes={list(checked)} must add up to {x.shape[dim]} (dim {dim} of {tuple(x.shape)})")
    return checked


def _one_for_each_rank(sizes: Sequence[int] | None, group: ProcessGroup) -> _Sizes:
    """Return `sizes` as a tuple after checking its length."""
    if sizes is None:
        return None
    if len(sizes) != group.size() or min(sizes) < 0:
        raise ValueError(
            f"sizes={list(sizes)} must have one entry for each of the group's {group.size()} ranks, none below 0"
        )
    return tuple(sizes)


# Each backward applies the conjugate Function, so that second derivatives are right as well.


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, reduce_dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.reduce_dtype = group, reduce_dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Reduce.apply(gradient, ctx.group, ctx.reduce_dtype), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, reduce_dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.reduce_dtype = group, reduce_dtype
        return async_collectives.cast(
            async_collectives.all_reduce(x.to(async_collectives.sum_dtype(x, reduce_dtype)), group), x.dtype
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Copy.apply(gradient, ctx.group, ctx.reduce_dtype), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, sizes: _Sizes) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return async_collectives.split(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Gather.apply(gradient, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, sizes: _Sizes) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return async_collectives.all_gather(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Split.apply(gradient, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _GatherPart(torch.autograd.Function):
    """All-gather whose ranks then compute different parts: the conjugate of reduce-scatter."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, dim: int, reduce_dtype: torch.dtype | None, sizes: _Sizes
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.reduce_dtype, ctx.sizes = group, dim, reduce_dtype, sizes
        return async_collectives.all_gather(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _ReduceScatter.apply(gradient, ctx.group, ctx.dim, ctx.reduce_dtype, ctx.sizes), *[None] * 4


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, dim: int, reduce_dtype: torch.dtype | None, sizes: _Sizes
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.reduce_dtype, ctx.sizes = group, dim, reduce_dtype, sizes
        return async_collectives.cast(
            async_collectives.reduce_scatter(x.to(async_collectives.sum_dtype(x, reduce_dtype)), group, dim, sizes),
            x.dtype,
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _GatherPart.apply(gradient, ctx.group, ctx.dim, ctx.reduce_dtype, ctx.sizes), *[None] * 4


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: ProcessGroup,
        split_dim: int,
        concat_dim: int,
        input_sizes: tuple[int, ...],
        output_sizes: tuple[int, ...],
    ) -> Tensor:
        ctx.group = group
        ctx.dims = split_dim, concat_dim
        ctx.sizes = input_sizes, output_sizes
        if split_dim == concat_dim == 0:
            return async_collectives.wait(async_collectives.start_all_to_all(x, group, output_sizes, input_sizes))
        # The parts for the ranks are not contiguous in general: lay them out one after another.
        parts = x.split(input_sizes, split_dim)
        shapes = []
        for size in output_sizes:
            shape = list(x.shape)
            shape[split_dim] = input_sizes[group.rank()]
            shape[concat_dim] = size
            shapes.append(shape)
        counts = [math.prod(shape) for shape in shapes]
        flat = torch.cat([part.reshape(-1) for part in parts])
        arrived = async_collectives.wait(
            async_collectives.start_all_to_all(flat, group, counts, [part.numel() for part in parts])
        )
        return torch.cat([a.view(s) for a, s in zip(arrived.split(counts), shapes, strict=True)], concat_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        split_dim, concat_dim = ctx.dims
        input_sizes, output_sizes = ctx.sizes
        back = _AllToAll.apply(gradient, ctx.group, concat_dim, split_dim, output_sizes, input_sizes)
        return back, None, None, None, None, None
