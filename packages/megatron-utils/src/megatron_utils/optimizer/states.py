"""`ParameterStates`: the optimizer state of each parameter, for any sharding over data parallelism.

Megatron's distributed optimizer (ZeRO stage 1) lays parameters end to end and gives each data-parallel rank an equal
range, which begins and ends anywhere inside a parameter. Checkpoints hold rectangles. So `state` returns a DTensor of
the parameter's shape with rows divided over the data-parallel group, and gathers the ranges of one parameter at a time.
`load` takes a whole tensor or such a DTensor, and each rank keeps its range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megatron_utils.optimizer.build import Optimizer, chained, get_steps, set_steps

MOMENTS = ("exp_avg", "exp_avg_sq")


class ParameterStates:
    """Master weights, moments and steps by parameter. With `OptimizerConfig.distributed` its methods are collective.

    Args:
        optimizer: The optimizer of the run.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._optimizers = chained(optimizer.inner)
        self._masters = {
            id(master): inner
            for inner in self._optimizers
            for group in inner.optimizer.param_groups
            for master in group["params"]
        }
        self._meshes: dict[ProcessGroup, DeviceMesh] = {}

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return `step` (one element), `exp_avg`, `exp_avg_sq` and, for 16-bit parameters, `master`, all fp32.

        The result is empty for a frozen parameter, and before the first step or `load`. Tensors have the parameter's
        shape; a distributed optimizer returns DTensors with rows divided over data parallelism.
        """
        inner = self._optimizer_of(parameter)
        if inner is None or not (self.optimizer.holds_states or self.optimizer.steps):
            return {}
        master = self._master(parameter, inner)
        slots = {} if master is None else inner.optimizer.state.get(master, {})
        tensors = {name: slots.get(name) for name in MOMENTS}
        if parameter.dtype != torch.float32:
            tensors["master"] = None if master is None else master.detach()
        step = torch.tensor(float(get_steps(inner)))
        if not isinstance(inner, DistributedOptimizer):
            return {"step": step, **{name: value for name, value in tensors.items() if value is not None}}
        # A rank without any parameter gets the step from other ranks.
        step = step.to(parameter.device)
        dist.all_reduce(step, op=dist.ReduceOp.MAX, group=inner.data_parallel_group)
        return {
            "step": step.cpu(),
            **{name: self._rows(parameter, value, inner) for name, value in tensors.items()},
        }

    @torch.no_grad()
    def load(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Load a state, whole or in DTensors; without `master` in it, the master weight is the current parameter.

        A run in low precision may continue in fp32; the master weight then becomes the parameter.
        """
        self.optimizer.holds_states |= bool(state)
        inner = self._optimizer_of(parameter)
        if inner is None:
            return
        full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}
        if not isinstance(inner, DistributedOptimizer):
            source = full.get("master", parameter)
            if source is not parameter:
                parameter.copy_(source)
        elif "master" in full:
            parameter.copy_(full["master"])
        master = self._master(parameter, inner)
        if master is None:
            return

        def local_range(x: Tensor) -> Tensor:
            """Return this rank's range of a tensor of the parameter's shape."""
            if not isinstance(inner, DistributedOptimizer):
                return x
            start, end = _ranges(parameter, inner)[inner.data_parallel_group.rank()]
            return x.reshape(-1)[start:end]

        if parameter.dtype != torch.float32:
            master.copy_(local_range(full.get("master", parameter)))
        inner.optimizer.state[master] = {
            name: local_range(full[name]).detach().to(master.device, torch.float32, copy=True)
            for name in MOMENTS
            if name in full
        }
        if "step" in full:
            set_steps(inner, int(full["step"]), master)

    def tensors(self) -> Iterator[Tensor]:
        """Yield this rank's moments, and master weights that are not parameters themselves."""
        for chunk in self.optimizer.chunks:
            for parameter in chunk.parameters():
                inner = self._optimizer_of(parameter)
                master = None if inner is None else self._master(parameter, inner)
                if inner is not None and master is not None:
                    if parameter.dtype != torch.float32:
                        yield master.detach()
                    slots = inner.optimizer.state.get(master, {})
                    yield from (slots[name] for name in MOMENTS if name in slots)

    def _optimizer_of(self, parameter: Tensor) -> Any | None:
        """Return the optimizer (of dense parameters or of experts) that updates a parameter."""
        for inner in self._optimizers:
            if isinstance(inner, DistributedOptimizer):
                if any(parameter in buffer.param_index_map for buffer in inner.buffers):
                    return inner
            elif inner is self._masters.get(id(getattr(parameter, "main_param", parameter))):
                return inner
        return None

    def _master(self, parameter: Tensor, inner: Any) -> Tensor | None:
        """Return the tensor that AdamW updates; None if this rank holds nothing of the parameter."""
        if not isinstance(inner, DistributedOptimizer):
            master: Tensor = getattr(parameter, "main_param", parameter)
            return master
        if parameter not in inner.model_param_group_index_map:
            return None
        group, place = inner.model_param_group_index_map[parameter]
        local_master: Tensor = inner.optimizer.param_groups[group]["params"][place]
        return local_master

    def _rows(self, parameter: Tensor, local_values: Tensor | None, inner: DistributedOptimizer) -> DTensor:
        """Turn the ranges of the data-parallel ranks into rows; return this rank's rows."""
        group = inner.data_parallel_group
        ranges = _ranges(parameter, inner)
        width = max(end - start for start, end in ranges)
        message = torch.zeros(width, device=parameter.device)
        if local_values is not None:
            message[: local_values.numel()] = local_values.flatten()
        received = torch.empty(len(ranges), width, device=parameter.device)
        dist.all_gather_into_tensor(received.view(-1), message, group=group)
        full = torch.cat([row[: end - start] for row, (start, end) in zip(received, ranges, strict=True)])
        full = full.view(parameter.shape)
        rows = -(-len(full) // len(ranges))
        local = full[group.rank() * rows : (group.rank() + 1) * rows].clone()
        if group not in self._meshes:
            self._meshes[group] = DeviceMesh.from_group(group, parameter.device.type)
        return DTensor.from_local(
            local, self._meshes[group], [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
        )


def _ranges(parameter: Tensor, inner: DistributedOptimizer) -> list[tuple[int, int]]:
    """Return the range of the flattened parameter on each rank of the data-parallel group."""
    buffer = next(buffer for buffer in inner.buffers if parameter in buffer.param_index_map)
    begin, end, number = buffer.param_index_map[parameter]
    bucket = buffer.buckets[number]
    size = inner.data_parallel_group.size()
    shard = bucket.grad_data.numel() // size
    ranges = []
    for rank in range(size):
        start = bucket.offset + rank * shard
        clipped = min(max(start, begin), end)
        ranges.append((clipped - begin, max(min(start + shard, end), clipped) - begin))
    return ranges
