"""What a checkpoint holds, as Megatron's sharded tensors: model, masters and moments, random streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor

from megatron_utils.grid import MegatronGrid
from megatron_utils.optimizer import Optimizer
from megatron_utils.optimizer.build import chained, counts_by_group, get_steps, set_steps

# The one format of a distributed optimizer that any other grid can read. Layers are keyed by their global numbers, so
# that dense and mixture layers may alternate.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "non_homogeneous_layers": True,
}


def sharded_state(optimizer: Optimizer, grid: MegatronGrid, *, loading: bool, same_grid: bool) -> dict[str, Any]:
    """The tensors of a training run; random streams only where the grid is the one that saved them.

    Of the optimizer these are masters and moments alone. Its step and loss scale are numbers, kept in `state.json`
    (`optimizer_numbers`); its parameter groups are made from the config and never saved, so that they may number
    differently on another grid (experts are a chained optimizer of their own where ep > 1, and only there).
    """
    model: dict[str, Any] = {
        f"model{number}": chunk.module.sharded_state_dict(metadata=_metadata(grid))
        for number, chunk in enumerate(optimizer.chunks)
    }
    state = dict(model)
    for number, inner in enumerate(chained(optimizer.inner)):
        state[f"optimizer{number}"] = dict(_sharded_leaves(_described(inner, model, grid, loading=loading)))
    if same_grid:
        state["random"] = random_streams(grid)
    return state


def load_optimizer(optimizer: Optimizer, grid: MegatronGrid, loaded: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Load masters, moments, step and loss scale, around what Megatron-Core 0.16 does with torch's AdamW.

    Its distributed optimizer copies every entry of a parameter's state, `step` among them, which it has not loaded; and
    it gives all parameters one and the same `step` tensor, so that each parameter's update would advance all. So the
    steps are set last, here.
    """
    model = {f"model{i}": c.module.sharded_state_dict(metadata=_metadata(grid)) for i, c in enumerate(optimizer.chunks)}
    step = torch.tensor(float(numbers["step"]))
    for number, inner in enumerate(chained(optimizer.inner)):
        state = _substituted(_described(inner, model, grid, loading=True), loaded[f"optimizer{number}"])
        if isinstance(inner, DistributedOptimizer):
            for group in state["optimizer"]["param_groups"]:
                group["step"] = numbers["step"]
        elif not counts_by_group(inner):
            state.get("optimizer", state)["state"]["common_step"] = step
        if numbers["grad_scaler"]:
            state["grad_scaler"] = {
                key: torch.tensor([value], device=torch.cuda.current_device()) if isinstance(value, float) else value
                for key, value in numbers["grad_scaler"].items()
            }
        kept = _step_kept(inner) if isinstance(inner, DistributedOptimizer) else contextlib.nullcontext()
        with torch.no_grad(), kept:
            inner.load_state_dict(state)
        set_steps(inner, numbers["step"])


def optimizer_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """What of the optimizer's state is no tensor of the model's shape: its step, and the loss scale.

    Collective over the default group: a rank whose parameters are all frozen knows no step.
    """
    step = torch.tensor([max(map(get_steps, chained(optimizer.inner)), default=0)], device=torch.cuda.current_device())
    dist.all_reduce(step, op=dist.ReduceOp.MAX)
    return {"step": int(step), "grad_scaler": optimizer.loss_scale_state}


def _metadata(grid: MegatronGrid) -> dict[str, Any]:
    # Modules tell replicas apart by the group that data parallelism replicates over.
    return METADATA | {"dp_cp_group": grid.groups.dp_cp}


def _described(inner: Any, model: dict[str, Any], grid: MegatronGrid, *, loading: bool) -> Any:
    """What one of the chained optimizers says its state is."""
    if not isinstance(inner, DistributedOptimizer):
        return inner.sharded_state_dict(model, is_loading=loading, metadata=_metadata(grid))
    with _padding_kept(inner), _step_known(inner):
        return inner.sharded_state_dict(model, is_loading=loading, metadata=_metadata(grid))


@contextlib.contextmanager
def _padding_kept(optimizer: DistributedOptimizer) -> Iterator[None]:
    """Have buckets gathered with the padding at their ends.

    Megatron-Core 0.16 leaves it out, and then takes parameters from where they lie with it: whatever follows a buffer's
    first bucket would be saved as other parameters' numbers. (A buffer has several buckets where gradients are reduced
    under the backward, and for embeddings that are tied over pipeline stages.)
    """
    sizes = [(bucket, bucket.grad_data.numel()) for buffer in optimizer.buffers for bucket in buffer.buckets]
    sizes += [(buffer, buffer.numel) for buffer in optimizer.buffers]
    before = [holder.numel_unpadded for holder, _ in sizes]
    try:
        for holder, size in sizes:
            holder.numel_unpadded = size
        yield
    finally:
        for (holder, _), size in zip(sizes, before, strict=True):
            holder.numel_unpadded = size


@contextlib.contextmanager
def _step_known(optimizer: DistributedOptimizer) -> Iterator[None]:
    """Have a count of steps also where this rank holds no parameter: Megatron-Core 0.16 asserts that there is one."""
    state = optimizer.optimizer.state
    if state or counts_by_group(optimizer):
        yield
        return
    state["nothing"] = {"step": torch.zeros(())}
    try:
        yield
    finally:
        optimizer.optimizer.state.pop("nothing", None)


def _sharded_leaves(value: Any, path: str = "") -> Iterator[tuple[str, ShardedBase]]:
    if isinstance(value, ShardedBase):
        yield path, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _sharded_leaves(item, f"{path}/{key}")


def _substituted(value: Any, loaded: dict[str, Any], path: str = "") -> Any:
    """The same structure, with what was loaded in the place of each description."""
    if isinstance(value, ShardedBase):
        return loaded[path]
    if isinstance(value, LocalNonpersistentObject):
        return value.unwrap()
    if isinstance(value, dict):
        return {key: _substituted(item, loaded, f"{path}/{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_substituted(item, loaded, f"{path}/{key}") for key, item in enumerate(value)]
    return value


def prime(optimizer: MegatronOptimizer) -> None:
    """Give every parameter the state that its first step would, so that there is something to load into."""
    for inner in chained(optimizer):
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                entries = inner.optimizer.state[parameter]
                if not entries:
                    if not counts_by_group(inner):
                        entries["step"] = torch.zeros((), dtype=torch.float32)
                    entries["exp_avg"] = torch.zeros_like(parameter.data)
                    entries["exp_avg_sq"] = torch.zeros_like(parameter.data)


@contextlib.contextmanager
def _step_kept(optimizer: DistributedOptimizer) -> Iterator[None]:
    set_states = optimizer._set_main_param_and_optimizer_states

    def with_step(model_parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        current = optimizer._get_main_param_and_optimizer_states(model_parameter)
        set_states(model_parameter, {**tensors, **{k: v for k, v in current.items() if k == "step"}})

    optimizer._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        del optimizer._set_main_param_and_optimizer_states


def random_streams(grid: MegatronGrid) -> dict[str, ShardedTensor]:
    """This rank's random states: torch's on the CPU and the device, and Megatron's named streams."""
    states = {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}
    states |= {f"stream.{name}": state for name, state in megatron_random.get_cuda_rng_tracker().get_states().items()}
    world = grid.groups.intra_dist_opt
    return {
        name: ShardedTensor.from_rank_offsets(
            f"random.{name}", state[None].clone(), (0, world.rank(), world.size()), replica_id=0
        )
        for name, state in states.items()
    }


def load_random_streams(states: dict[str, Tensor]) -> None:
    """Put this rank's random states back."""
    plain = {name: state[0].cpu() for name, state in states.items()}
    torch.set_rng_state(plain.pop("cpu"))
    torch.cuda.set_rng_state(plain.pop("device"))
    megatron_random.get_cuda_rng_tracker().set_states(
        {name.removeprefix("stream."): state for name, state in plain.items()}
    )
