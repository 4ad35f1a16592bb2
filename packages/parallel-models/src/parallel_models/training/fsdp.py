"""Data parallelism by torch's FSDP2, with gradients summed over the ranks; forward and backward without a pipeline.

FSDP2 takes over a second to import; it is imported where a module is sharded over several ranks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from parallel_layers.module import is_dtensor
from parallel_models.engine.engine import Loss, MicroBatch, Outputs
from parallel_models.engine.grid import Grid

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def shard_over_dp(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    grid: Grid,
    *,
    experts: Iterable[nn.Module] = (),
    head: nn.Module | None = None,
    reshard_blocks: bool = True,
) -> None:
    """Shard a loaded module in place over the ranks dp x cp of a replica: parameters, gradients and optimizer states.

    FSDP2 gathers parameters of one dtype together. Submodules in another dtype, such as the fp32 routers of a bf16
    model, are gathered apart. Experts distributed over ep are sharded over the ranks with the same experts; where no
    two ranks have the same experts, FSDP2 leaves the experts alone. Gradients are summed over the ranks of all
    replicas: the loss is already divided by the number of tokens of all ranks, so all tokens weigh the same.

    Args:
        module: The root, with its weights.
        blocks: The submodules to shard separately (the decoder layers).
        grid: The grid of the model; nothing is sharded if no two ranks hold the same parameters, unless parameters are
            DTensors already, whose gradients FSDP2 then sums in fp32 over micro-batches.
        experts: The submodules of the blocks whose parameters are distributed over ep.
        head: A submodule whose `run` is its forward. Its weights are gathered while the blocks compute, and stay
            gathered until its backward; its gradients are summed while the blocks run backward.
        reshard_blocks: Release each block after its forward. False keeps blocks gathered until the backward.
    """
    data, copies = grid.shard_mesh, grid.expert_shard_mesh
    if data is None:
        return
    alone = data.size() == 1 and (copies is None or copies.size() == 1)
    if alone and not any(map(is_dtensor, module.parameters())):
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # Gradients of low-precision weights are summed in fp32, over micro-batches and over ranks.
    low = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in module.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False)
    ignored: set[nn.Parameter] = set()
    if copies is not None and copies.size() == 1:
        ignored = {parameter for expert in experts for parameter in expert.parameters()}
    shard = partial(fully_shard, mp_policy=policy, ignored_params=ignored)
    if copies is not None and copies.size() > 1:
        for expert in experts:
            shard(expert, mesh=copies, reshard_after_forward=reshard_blocks)
    for submodule in _of_another_dtype(module, ignored):
        shard(submodule, mesh=data, reshard_after_forward=reshard_blocks)
    for block in blocks:
        shard(block, mesh=data, reshard_after_forward=reshard_blocks)
    if head is not None:
        shard(head, mesh=data, reshard_after_forward=False)
        register_fsdp_forward_method(head, "run")
    shard(module, mesh=data, reshard_after_forward=False)
    for shard_module in _sharded_modules(module):
        shard_module.set_force_sum_reduction_for_comms(True)
        shard_module.set_gradient_divide_factor(1.0)


def _of_another_dtype(model: nn.Module, ignored: Collection[nn.Parameter]) -> list[nn.Module]:
    """Return the submodules holding trained parameters in a minority dtype, innermost first."""
    elements = Counter[torch.dtype]()
    for parameter in model.parameters():
        elements[parameter.dtype] += parameter.numel() * (parameter.requires_grad and parameter not in ignored)
    common = max(elements, key=elements.__getitem__, default=None)
    return [
        module
        for module in reversed(list(model.modules()))
        if any(p.requires_grad and p.dtype != common and p not in ignored for p in module.parameters(recurse=False))
    ]


def _sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """Return the sharded modules, the root first."""
    return [submodule for submodule in module.modules() if _is_sharded(submodule)]


def _is_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


@contextmanager
def gathered(module: nn.Module, *, reshard_blocks: bool = True) -> Iterator[None]:
    """Keep all parameters gathered, so that ranks may run different numbers of passes; see `shard_over_dp`."""
    modules = _sharded_modules(module)
    for submodule in modules:
        submodule.unshard()
        submodule.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for number, submodule in enumerate(modules):
            # As in `shard_over_dp`: the root, which comes first, and the head stay gathered.
            stays = number == 0 or "run" in submodule.__dict__ or not reshard_blocks
            submodule.set_reshard_after_forward(not stays, recurse=False)
        release(module)


def release(module: nn.Module) -> None:
    """Release parameters that a forward without a backward left gathered."""
    for submodule in _sharded_modules(module):
        submodule.reshard()


Model = Callable[[MicroBatch], Outputs]


def forward_each(model: Model, module: nn.Module, micro_batches: Sequence[MicroBatch]) -> list[Outputs]:
    """Return the outputs of every micro-batch, without a graph; `module` holds the parameters of `model`."""
    with torch.no_grad():
        outputs = [model(micro_batch) for micro_batch in micro_batches]
    release(module)
    return outputs


def backward_each(model: Model, module: nn.Module, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
    """Sum the gradients of the losses; data-parallel ranks exchange gradients in the last backward."""
    for number, micro_batch in enumerate(micro_batches):
        if _is_sharded(module):
            is_last = number == len(micro_batches) - 1
            module.set_requires_gradient_sync(is_last)
            module.set_is_last_backward(is_last)
        loss(micro_batch, model(micro_batch)).backward()


def drop_gradients(module: nn.Module) -> None:
    """Drop all gradients on this rank and reset FSDP2, from torch 2.13 on also after an interrupted pass."""
    for submodule in _sharded_modules(module):
        state = submodule._get_fsdp_state()
        if state._is_root and hasattr(submodule, "reset_iter_state"):
            submodule.reset_iter_state()
        # Gradients accumulated before the last backward belong to the gathered parameters; torch has no API for them.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for parameter in [parameter for group in groups if group is not None for parameter in group.fsdp_params]:
            if "unsharded_accumulated_grad" in vars(parameter):  # in 2.15 it reads `_unsharded_param.grad`
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        submodule.reshard()
    for parameter in module.parameters():
        parameter.grad = None
