"""Data parallelism by torch's FSDP2, with gradients that are sums over the ranks.

FSDP2 takes over a second to import: whoever shards a module over several ranks does so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from parallel_layers.sharding import is_dtensor
from rl_models.grid import Grid

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def shard_over_dp(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    grid: Grid,
    *,
    experts: Iterable[nn.Module] = (),
    reshard_blocks: bool = True,
) -> None:
    """Shard parameters, gradients and optimizer states of a loaded module over the ranks that hold the same, in place.

    These are the ranks of dp x cp; for experts that are shared out, those with the same experts. Gradients are summed
    over them, not averaged: the loss is divided by the number of tokens of all ranks, so that every token weighs the
    same wherever it was.

    Args:
        module: the root, with its weights.
        blocks: the submodules to shard on their own (the decoder layers).
        grid: the identity where no two ranks hold the same.
        experts: submodules of the blocks whose parameters are shared out over ep.
        reshard_blocks: release each block after it has run, and gather it again for its backward. Otherwise it stays
            gathered from the forward to the backward, like the rest, which belongs to the root.
    """
    copies = None if grid.expert_mesh is None else grid.expert_mesh["dp"]
    if grid.data_mesh is None or (grid.data_mesh.size() == 1 and (copies is None or copies.size() == 1)):
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Gradients of low-precision weights add up in fp32, over micro-batches and over ranks.
    low = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in module.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False)
    if copies is not None:
        for expert in experts:
            fully_shard(expert, mesh=copies, reshard_after_forward=reshard_blocks, mp_policy=policy)
    for block in blocks:
        fully_shard(block, mesh=grid.data_mesh, reshard_after_forward=reshard_blocks, mp_policy=policy)
    fully_shard(module, mesh=grid.data_mesh, reshard_after_forward=False, mp_policy=policy)
    for part in _parts(module):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)


def _parts(module: nn.Module) -> list[FSDPModule]:
    """The root, if it is sharded, and the blocks."""
    return [part for part in module.modules() if _is_sharded(part)]


def _is_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def sync_gradients(module: nn.Module, last: bool) -> None:
    """Say whether the next backward is the last of an update: only then are gradients summed over dp."""
    if _is_sharded(module):
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)


@contextmanager
def gathered(module: nn.Module, *, reshard_blocks: bool = True) -> Iterator[None]:
    """Keep all parameters gathered, so that ranks may run different numbers of forward passes inside.

    `reshard_blocks` as it was sharded with.
    """
    parts = _parts(module)
    for part in parts:
        part.unshard()
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for number, part in enumerate(parts):
            # As `shard_over_dp` made them: the root, which comes first, stays gathered.
            part.set_reshard_after_forward(number > 0 and reshard_blocks, recurse=False)
        release(module)


def release(module: nn.Module) -> None:
    """Drop what a forward without a backward has left gathered; the shards may change before the next."""
    for part in _parts(module):
        part.reshard()


def drop_gradients(module: nn.Module) -> None:
    """Drop all gradients on this rank. The next forward starts anew, also where one or a backward has been interrupted
    (before torch 2.13, which can take that back, only where all have come to their ends)."""
    for part in _parts(module):
        state = part._get_fsdp_state()
        if state._is_root and hasattr(part, "reset_iter_state"):
            part.reset_iter_state()
        # What adds up until the last backward belongs to the gathered parameters, which torch neither shows nor drops.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for parameter in [parameter for group in groups if group is not None for parameter in group.fsdp_params]:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        part.reshard()
    for parameter in module.parameters():
        parameter.grad = None


@torch.no_grad()
def full_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The `state_dict` with every tensor gathered over dp, on the CPU, tied ones still one; every dp rank calls it."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    full: dict[str, Tensor] = {}
    gathered_once: dict[int, Tensor] = {}
    for name, tensor in module.state_dict().items():
        key = id(parameters.get(name, tensor))
        if key not in gathered_once:
            whole = tensor.full_tensor() if is_dtensor(tensor) else tensor
            gathered_once[key] = whole.detach().cpu()
        full[name] = gathered_once[key]
    return full
