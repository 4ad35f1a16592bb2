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
part, and the backward sums.

Common to all functions:

- The result is a new tensor, or the input itself if the group is None or has one rank. Inputs and gradients are never
  changed. The functions can be differentiated twice, and torch.compile traces them.
- Parts are equal: a size that does not divide raises ValueError. Every rank must pass a tensor of the same shape.
- Sums over the ranks are taken in `reduce_dtype`, by default at least fp32, and rounded to the tensor's dtype.

Sources: Megatron-LM (https://arxiv.org/abs/1909.08053) and its sequence parallelism (https://arxiv.org/abs/2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed.async_collectives import (
    all_gather,
    all_reduce,
    cast,
    check_divisible,
    is_sharded,
    reduce_scatter,
    split,
    start_all_to_all,
    sum_dtype,
    wait,
)


def copy_to_tensor_parallel(
    x: Tensor, group: ProcessGroup | None, *, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Return `x`, from which each rank then computes a part of the result."""
    return _apply("copy", x, group, reduce_dtype=reduce_dtype)


def reduce_from_tensor_parallel(
    x: Tensor, group: ProcessGroup | None, *, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Sum partial results over the ranks."""
    return _apply("all-reduce", x, group, reduce_dtype=reduce_dtype)


def scatter_to_tensor_parallel(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Keep this rank's part of the last dim of a replicated `x` `[..., H]`: `[..., H/tp]`."""
    return _apply("split", x, group, x.dim() - 1)


def gather_from_tensor_parallel(
    x: Tensor, group: ProcessGroup | None, *, reduce_gradient: bool = False, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Concatenate the ranks' last dims: `[..., H/tp]` -> `[..., H]`.

    Set `reduce_gradient` if the ranks compute different parts from the gathered tensor.
    """
    return _apply("gather parts" if reduce_gradient else "gather", x, group, x.dim() - 1, reduce_dtype)


def reduce_scatter_to_tensor_parallel(
    x: Tensor, group: ProcessGroup | None, *, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Sum the ranks' `[..., H]` and keep this rank's part of the last dim: `[..., H/tp]`."""
    return _apply("reduce-scatter", x, group, x.dim() - 1, reduce_dtype)


def scatter_to_sequence_parallel(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Keep this rank's tokens of a replicated `x`: `[T, ...]` -> `[T/tp, ...]`."""
    return _apply("split", x, group, 0)


def gather_from_sequence_parallel(
    x: Tensor, group: ProcessGroup | None, *, reduce_gradient: bool = True, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Concatenate the ranks' tokens: `[T/tp, ...]` -> `[T, ...]`.

    Clear `reduce_gradient` if all ranks compute the same from the gathered tensor.
    """
    return _apply("gather parts" if reduce_gradient else "gather", x, group, 0, reduce_dtype)


def reduce_scatter_to_sequence_parallel(
    x: Tensor, group: ProcessGroup | None, *, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Sum the ranks' partial `[T, ...]` and keep this rank's tokens: `[T/tp, ...]`."""
    return _apply("reduce-scatter", x, group, 0, reduce_dtype)


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
        group: The ranks.
        split_dim: The dim to cut.
        concat_dim: The dim to concatenate along.
        input_sizes: Units of `split_dim` for each rank (default: equal parts). If the two dims differ, `input_sizes`
            must be the same on all ranks.
        output_sizes: Units of `concat_dim` from each rank. Default: `input_sizes`, or if the dims differ this rank's
            size of `concat_dim` from every rank.
    """
    if not is_sharded(group):
        return x
    split_dim, concat_dim = split_dim % x.dim(), concat_dim % x.dim()
    size = group.size()
    if input_sizes is None:
        check_divisible(x, split_dim, group)
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


def _apply(
    name: str, x: Tensor, group: ProcessGroup | None, dim: int = 0, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Apply a map of `_MAPS` along dim `dim` of `x`."""
    return _Map.apply(x, name, group, dim, reduce_dtype) if is_sharded(group) else x


class _Map(torch.autograd.Function):
    """A map of `_MAPS`. The backward applies the conjugate map, so that second derivatives are right as well."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, name: str, group: ProcessGroup, dim: int, reduce_dtype: torch.dtype | None
    ) -> Tensor:
        function, conjugate = _MAPS[name]
        ctx.arguments = conjugate, group, dim, reduce_dtype
        return function(x, group, dim, reduce_dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Map.apply(gradient, *ctx.arguments), None, None, None, None


def _all_reduce(x: Tensor, group: ProcessGroup, dim: int, reduce_dtype: torch.dtype | None) -> Tensor:
    return cast(all_reduce(x.to(sum_dtype(x, reduce_dtype)), group), x.dtype)


def _reduce_scatter(x: Tensor, group: ProcessGroup, dim: int, reduce_dtype: torch.dtype | None) -> Tensor:
    return cast(reduce_scatter(x.to(sum_dtype(x, reduce_dtype)), group, dim), x.dtype)


# Name of a map: the map, and the name of its conjugate. Ranks compute different parts from "gather parts".
_MAPS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "copy": (lambda x, *_: x.view_as(x), "all-reduce"),
    "all-reduce": (_all_reduce, "copy"),
    "split": (lambda x, group, dim, _: split(x, group, dim), "gather"),
    "gather": (lambda x, group, dim, _: all_gather(x, group, dim), "split"),
    "gather parts": (lambda x, group, dim, _: all_gather(x, group, dim), "reduce-scatter"),
    "reduce-scatter": (_reduce_scatter, "gather parts"),
}


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
        ctx.arguments = group, concat_dim, split_dim, output_sizes, input_sizes
        if split_dim == concat_dim == 0:
            return wait(start_all_to_all(x, group, output_sizes, input_sizes))
        # The parts for the ranks are not contiguous in general: lay them out one after another.
        tensors = x.split(input_sizes, split_dim)
        shapes = []
        for size in output_sizes:
            shape = list(x.shape)
            shape[split_dim] = input_sizes[group.rank()]
            shape[concat_dim] = size
            shapes.append(shape)
        counts = [math.prod(shape) for shape in shapes]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        arrived = wait(start_all_to_all(flat, group, counts, [tensor.numel() for tensor in tensors]))
        return torch.cat([a.view(s) for a, s in zip(arrived.split(counts), shapes, strict=True)], concat_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(gradient, *ctx.arguments), None, None, None, None, None
