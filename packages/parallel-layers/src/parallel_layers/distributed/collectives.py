"""Differentiable collectives. Each is a linear map and its backward is the map's conjugate, so the pair is exact.

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

A backward depends on what the other side of the collective does with the gradient. When every rank computes the same
function of a gathered or reduced tensor, the ranks' gradients are equal and complete: the conjugate splits, or does
nothing. When each rank computes a part (its columns, its tokens), each gradient is a part too, and the conjugate sums.
(torch's own differentiable functional collectives always sum: the backward of their all-reduce is an all-reduce, which
counts a replicated loss once for each rank.)

All of them take a tensor and a group, return a new tensor (or the input itself when the group is None or has one rank),
change neither inputs nor gradients, accept non-contiguous and empty tensors of any number of dims, can be
differentiated twice, and are traced by torch.compile. Parts are equal, and a size that does not divide raises
ValueError, unless `sizes` says how many units of the dim each rank has (`all_to_all`: what is sent and what arrives).
Every rank must be given the same `sizes` and, without them, tensors of the same shape: to find out costs a
communication of its own and a wait for the device, so it is not checked, and gloo and NCCL fail in ways of their own
where it does not hold. Those that sum over the ranks, forward or backward, do it in `reduce_dtype`, by
default at least fp32, and round to the tensor's dtype afterwards; for bf16 that is twice the bytes of a sum in bf16,
which rounds at each of its steps. The notation follows Megatron-LM (https://arxiv.org/abs/1909.08053) and its sequence
parallelism (https://arxiv.org/abs/2205.05198).
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
    """Enter a region where each rank computes a part of the result from the whole `x`.

    Forward: identity. Backward: all-reduce (each rank's gradient is a part of the sum).
    """
    return _Copy.apply(x, group, reduce_dtype) if async_collectives.is_sharded(group) else x


def reduce_from_tensor_parallel(
    x: Tensor, group: ProcessGroup | None, *, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Sum the ranks' partial results; every rank goes on with the sum.

    Forward: all-reduce. Backward: identity.
    """
    return _Reduce.apply(x, group, reduce_dtype) if async_collectives.is_sharded(group) else x


def scatter_to_tensor_parallel(x: Tensor, group: ProcessGroup | None, *, sizes: Sequence[int] | None = None) -> Tensor:
    """Keep this rank's part of the last dim of a replicated `x`: `[..., H]` -> `[..., H/size]`, or `sizes[rank]` of it.

    Forward: split, no communication. Backward: all-gather. Raises ValueError when the group's size does not divide H,
    or the sizes do not add up to it.
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
    """Concatenate the ranks' last dims: `[..., H/size]`, or `sizes[rank]` of it, -> `[..., H]`.

    Forward: all-gather. Backward: split; with `reduce_gradient`, for ranks that compute different parts from the
    gathered tensor, reduce-scatter. Raises ValueError when `sizes` does not state what this rank has.
    """
    return _gather(x, group, x.dim() - 1, reduce_gradient, reduce_dtype, sizes)


def reduce_scatter_to_tensor_parallel(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    reduce_dtype: torch.dtype | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sum the ranks' `[..., H]` and keep this rank's part of the last dim: `[..., H/size]`, or `sizes[rank]` of it.

    Forward: reduce-scatter. Backward: all-gather. Raises ValueError as `scatter_to_tensor_parallel`.
    """
    return _reduce_scatter(x, group, x.dim() - 1, reduce_dtype, sizes)


def scatter_to_sequence_parallel(
    x: Tensor, group: ProcessGroup | None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Keep this rank's tokens of a replicated `x`: `[T, ...]` -> `[T/size, ...]`, or `sizes[rank]` of them.

    Forward: split, no communication. Backward: all-gather. Raises ValueError when the group's size does not divide T,
    or the sizes do not add up to it.
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
    """Concatenate the ranks' tokens: `[T/size, ...]`, or `sizes[rank]` of them, -> `[T, ...]`.

    Forward: all-gather. Backward: reduce-scatter; without `reduce_gradient`, for ranks that all compute the same from
    the gathered tensor, split. Raises ValueError when `sizes` does not state what this rank has.
    """
    return _gather(x, group, 0, reduce_gradient, reduce_dtype, sizes)


def reduce_scatter_to_sequence_parallel(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    reduce_dtype: torch.dtype | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sum the ranks' partial `[T, ...]` and keep this rank's tokens: `[T/size, ...]`, or `sizes[rank]` of them.

    Forward: reduce-scatter. Backward: all-gather. Raises ValueError as `scatter_to_sequence_parallel`.
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
    """Cut `x` along `split_dim`, send part r to rank r, concatenate what arrives along `concat_dim`.

    With `split_dim=1, concat_dim=0` a tensor of some tokens and all heads or hidden units becomes one of all tokens and
    some heads, `[T/size, H]` -> `[T, H/size]`; with `split_dim=0, concat_dim=1` it turns back. With both 0 rows are
    exchanged, as experts need it.

    Args:
        x: The tensor to exchange.
        group: None returns `x`.
        split_dim: The dim to cut.
        concat_dim: The dim to join along.
        input_sizes: `input_sizes[r]` units of `split_dim` go to rank r; default equal parts. When the two dims differ
            they must be the same on all ranks.
        output_sizes: `output_sizes[r]` units of `concat_dim` arrive from rank r; default as many as this rank sends
            (when the dims differ: as many as this rank has).

    Forward: all-to-all. Backward: all-to-all with the two sides exchanged.

    Raises:
        ValueError: `split_dim` does not divide and no sizes are given, or the sizes do not add up.
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
    """Sizes of the parts of `x`, checked."""
    assert group is not None
    checked = _one_for_each_rank(sizes, group)
    if checked is not None and sum(checked) != x.shape[dim]:
        raise ValueError(f"sizes={list(checked)} must add up to {x.shape[dim]} (dim {dim} of {tuple(x.shape)})")
    return checked


def _one_for_each_rank(sizes: Sequence[int] | None, group: ProcessGroup) -> _Sizes:
    """The sizes, checked."""
    if sizes is None:
        return None
    if len(sizes) != group.size() or min(sizes) < 0:
        raise ValueError(
            f"sizes={list(sizes)} must have one entry for each of the group's {group.size()} ranks, none below 0"
        )
    return tuple(sizes)


# Each backward applies the conjugate as a Function of its own, which makes second derivatives right as well.


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
    """All-gather for ranks that then compute different parts: the conjugate of reduce-scatter."""

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
        # In general the parts for the ranks are no runs of memory: lay them out one after another.
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
