"""Data parallelism by torch's FSDP2, with gradients that are sums over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from rl_models.grid import Grid


def shard_over_dp(module: nn.Module, blocks: Iterable[nn.Module], grid: Grid, methods: Iterable[str] = ()) -> None:
    """Shard parameters, gradients and optimizer states of a loaded module over the grid's dp axis, in place.

    Each block is gathered when it runs and released after; the rest belongs to the root, which stays gathered from the
    forward until its backward. Gradients are summed over dp, not averaged: the loss is divided by the number of
    tokens of all ranks, so that every token weighs the same wherever it was.

    Args:
        module: the root, with its weights.
        blocks: the submodules to shard on their own (the decoder layers).
        grid: the identity where dp is 1.
        methods: methods of the root that are called in the place of `forward`.
    """
    if grid.group("dp") is None:
        return
    assert grid.mesh is not None
    mesh = grid.mesh["dp"]
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    for part in _parts(module):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
    for method in methods:
        register_fsdp_forward_method(module, method)


def _parts(module: nn.Module) -> list[FSDPModule]:
    """The root, if it is sharded, and the blocks."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def sync_gradients(module: nn.Module, last: bool) -> None:
    """Say whether the next backward is the last of an update: only then are gradients summed over dp."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Keep all parameters gathered over dp, so that ranks may run different numbers of forward passes inside."""
    parts = _parts(module)
    for part in parts:
        part.unshard()
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for number, part in enumerate(parts):
            # As `shard_over_dp` made them: the root, which comes first, stays gathered.
            part.set_reshard_after_forward(number > 0, recurse=False)
            part.reshard()


@torch.no_grad()
def full_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The `state_dict` with every tensor gathered over dp, on the CPU, tied ones still one; every dp rank calls it."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    full: dict[str, Tensor] = {}
    gathered_once: dict[int, Tensor] = {}
    for name, tensor in module.state_dict().items():
        key = id(parameters.get(name, tensor))
        if key not in gathered_once:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            gathered_once[key] = whole.detach().cpu()
        full[name] = gathered_once[key]
    return full
