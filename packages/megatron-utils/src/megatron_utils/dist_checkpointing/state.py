"""The contents of a checkpoint as Megatron's sharded tensors: model, master weights, moments, random streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_utils.grid import MegatronGrid
from megatron_utils.optimizer.build import Optimizer, chained, counts_by_group, get_steps, set_steps
from megatron_utils.random_streams import tracker
from parallel_layers.device import gpu
from parallel_layers.linear import LowRank

# The only format of a distributed optimizer that every other grid can read. The keys hold the global numbers of layers,
# so dense and mixture layers may alternate.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "non_homogeneous_layers": True,
}


def sharded_state(optimizer: Optimizer, grid: MegatronGrid, *, loading: bool, same_grid: bool) -> dict[str, Any]:
    """Return the tensors of a training run; with random streams only if the same grid saves and loads.

    From the optimizer come master weights and moments. Its step and loss scale are numbers in `state.json`
    (`optimizer_numbers`). Its parameter groups are made from the config and never saved, so another grid may number
    them differently (with ep > 1, a separate chained optimizer holds the experts).
    """
    model: dict[str, Any] = {
        f"model{number}": without_objects(chunk.module.sharded_state_dict(metadata=_metadata(grid)))
        for number, chunk in enumerate(optimizer.chunks)
    }
    state = dict(model)
    for number, inner in enumerate(chained(optimizer.inner)):
        state[f"optimizer{number}"] = dict(_sharded_leaves(_described(inner, model, grid, loading=loading)))
    if same_grid:
        state["random"] = random_streams(grid)
    return state


def unsaved(optimizer: Optimizer) -> list[str]:
    """Return the reasons against a save: Megatron's linears describe parts of adapters as copies of one tensor."""
    has_adapters = any(isinstance(module, LowRank) for chunk in optimizer.chunks for module in chunk.modules())
    return ["the model has low-rank adapters, which rl-models saves (Actor.save_training), or rl-ckpt"] * has_adapters


def without_objects(state: dict[str, Any]) -> dict[str, Any]:
    """Keep a module's objects (`_extra_state`) out of files: a load gives the module its own object back.

    Objects are pickles, which could run code when loaded. Outside of FP8 training they are empty.
    """

    def keep(value: Any) -> Any:
        return LocalNonpersistentObject(value.data) if isinstance(value, ShardedObject) else value

    return dict(dict_list_map_inplace(keep, state))


def load_optimizer(optimizer: Optimizer, grid: MegatronGrid, loaded: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Load master weights, moments, step and loss scale; correct two mistakes of Megatron-Core 0.16 with torch's AdamW.

    The distributed optimizer copies the `step` of each parameter although it has not loaded any, and it gives all
    parameters the same `step` tensor, so the update of each parameter would advance all steps. Set the steps last.
    """
    model = {f"model{i}": c.module.sharded_state_dict(metadata=_metadata(grid)) for i, c in enumerate(optimizer.chunks)}
    step = torch.tensor(float(numbers["step"]))
    for number, inner in enumerate(chained(optimizer.inner)):
        state = _substituted(_described(inner, model, grid, loading=True), loaded.get(f"optimizer{number}", {}))
        if isinstance(inner, DistributedOptimizer):
            for group in state["optimizer"]["param_groups"]:
                group["step"] = numbers["step"]
        elif not counts_by_group(inner):
            state.get("optimizer", state)["state"]["common_step"] = step
        if numbers["grad_scaler"]:
            state["grad_scaler"] = {
                key: torch.tensor([value], device=gpu.current_device()) if isinstance(value, float) else value
                for key, value in numbers["grad_scaler"].items()
            }
        step_guard = _step_kept(inner) if isinstance(inner, DistributedOptimizer) else contextlib.nullcontext()
        with torch.no_grad(), step_guard:
            inner.load_state_dict(state)
        set_steps(inner, numbers["step"])


def optimizer_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Return the numbers of the optimizer's state: the step and the loss scale.

    Collective over the default group: a rank with frozen parameters only gets the step from other ranks.
    """
    step = torch.tensor([max(map(get_steps, chained(optimizer.inner)), default=0)], device=gpu.current_device())
    dist.all_reduce(step, op=dist.ReduceOp.MAX)
    return {"step": int(step), "grad_scaler": optimizer.loss_scale_state}


def _metadata(grid: MegatronGrid) -> dict[str, Any]:
    # Modules number their replicas by the data-parallel group.
    return METADATA | {"dp_cp_group": grid.groups.dp_cp}


def _described(inner: Any, model: dict[str, Any], grid: MegatronGrid, *, loading: bool) -> Any:
    """Return the sharded state of one of the chained optimizers."""
    if not isinstance(inner, DistributedOptimizer):
        return inner.sharded_state_dict(model, is_loading=loading, metadata=_metadata(grid))
    with _padding_kept(inner), _step_known(inner):
        return inner.sharded_state_dict(model, is_loading=loading, metadata=_metadata(grid))


@contextlib.contextmanager
def _padding_kept(optimizer: DistributedOptimizer) -> Iterator[None]:
    """Gather buckets together with the padding at their ends.

    Megatron-Core 0.16 gathers without the padding, but takes the parameters from their places with padding: behind the
    first bucket of a buffer it would save numbers of other parameters. A buffer has several buckets if gradients are
    reduced during the backward, or embeddings are tied over pipeline stages.
    """
    sizes = [(bucket, bucket.grad_data.numel()) for buffer in optimizer.buffers for bucket in buffer.buckets]
    sizes += [(buffer, buffer.numel) for buffer in optimizer.buffers]
    original_sizes = [holder.numel_unpadded for holder, _ in sizes]
    try:
        for holder, size in sizes:
            holder.numel_unpadded = size
        yield
    finally:
        for (holder, _), size in zip(sizes, original_sizes, strict=True):
            holder.numel_unpadded = size


@contextlib.contextmanager
def _step_known(optimizer: DistributedOptimizer) -> Iterator[None]:
    """Give a rank without parameters a step count, because Megatron-Core 0.16 asserts that there is one."""
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
    """Return the same structure with each sharded description replaced by its loaded tensor."""
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
    """Create the optimizer state of every parameter, as the first step would, so that a load has tensors to fill."""
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
    """Return the random states of this rank: torch's on the CPU and the device, and Megatron's named streams."""
    states = {"cpu": torch.get_rng_state(), "device": gpu.get_rng_state()}
    states |= {f"stream.{name}": state for name, state in tracker().get_states().items()}
    world = grid.groups.intra_dist_opt
    return {
        name: ShardedTensor.from_rank_offsets(
            f"random.{name}", state[None].clone(), (0, world.rank(), world.size()), replica_id=0
        )
        for name, state in states.items()
    }


def load_random_streams(states: dict[str, Tensor]) -> None:
    """Restore the random states of this rank."""
    plain = {name: state[0].cpu() for name, state in states.items()}
    torch.set_rng_state(plain.pop("cpu"))
    gpu.set_rng_state(plain.pop("device"))
    tracker().set_states({name.removeprefix("stream."): state for name, state in plain.items()})
