"""Sums of gradients over a group, once for several backwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.distributed.async_collectives import is_sharded, start_all_reduce, sum_dtype, wait
from parallel_layers.module.sharding import is_dtensor

# Larger gradients are sent apart: a copy of all of them at once could be gigabytes.
_TOGETHER = 2**20


@contextmanager
def sum_norm_gradients_once(
    model: nn.Module, group: ProcessGroup | None, parameters: Iterable[nn.Parameter] = ()
) -> Iterator[None]:
    """Sum the gradients of all norm weights over the tensor-parallel group in one all-reduce, at the end of the body.

    Elsewhere each norm sums the gradient of its weight in each backward. Here the body runs the forwards and backwards
    of any number of micro-batches, in which gradients are parts of this rank. Gradients of earlier backwards are
    complete, and are added to the sums. Sums are at least fp32.

    FSDP2 may shard the model: it sums over the data-parallel ranks first. The last backward of the body must then
    exchange gradients (`set_requires_gradient_sync`).

    Args:
        model: The model that the body runs; a view (`shared_weights.view_of`) has separate norms.
        group: The tensor-parallel group; with None or one rank nothing happens.
        parameters: Other parameters, whole on every rank, whose gradients in the body are parts of this rank.

    Communication: one all-reduce of all gradients of at most 2^20 elements, and one of each larger gradient.
    """
    if not is_sharded(group):
        yield
        return
    modules: Iterable[Any] = model.modules()
    norms = {module: ranks for module in modules if (ranks := getattr(module, "gradient_group", None)) is not None}
    sums: dict[Tensor, Tensor | None] = {x: x.grad for x in (*(norm.weight for norm in norms), *parameters)}
    for parameter in sums:
        parameter.grad = None
    for norm in norms:
        norm.gradient_group = None
    try:
        yield
    finally:
        for norm, ranks in norms.items():
            norm.gradient_group = ranks
    with torch.no_grad():
        _sum_([parameter.grad for parameter in sums if parameter.grad is not None], group)
        for parameter, earlier in sums.items():
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)


def _sum_(gradients: Sequence[Tensor], group: ProcessGroup) -> None:
    """Sum gradients over the group in place, each rounded once."""
    local = [gradient.to_local() if is_dtensor(gradient) else gradient for gradient in gradients]
    small = [gradient for gradient in local if gradient.numel() <= _TOGETHER]
    for together in (small, *([gradient] for gradient in local if gradient.numel() > _TOGETHER)):
        if together:
            dtype = max(map(sum_dtype, together), key=lambda dtype: dtype.itemsize)
            flat = torch.cat([gradient.flatten().to(dtype) for gradient in together])
            total = wait(start_all_reduce(flat, group, owned=True))
            for gradient, piece in zip(together, total.split([x.numel() for x in together]), strict=True):
                gradient.copy_(piece.view_as(gradient))
