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
        self._parts = chained(optimizer.inner)
        self._masters = {
            id(master): part
            for part in self._parts
            for group in part.optimizer.param_groups
            for master in group["params"]
        }
        self._meshes: dict[ProcessGroup, DeviceMesh] = {}

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return `step` (one element), `exp_avg`, `exp_avg_sq` and, for 16-bit parameters, `master`, all fp32.

        The result is empty for a frozen parameter, and before the first step or `load`. Tensors have the parameter's
        shape; a distributed optimizer returns DTensors with rows divided over data parallelism.
        """
        part = self._part(parameter)
        if part is None or not (self.optimizer.holds_states or self.optimizer.steps):
            return {}
        master = self._master(parameter, part)
        slots = {} if master is None else part.optimizer.state.get(master, {})
        held = {name: slots.get(name) for name in MOMENTS}
        if parameter.dtype != torch.float32:
            held["master"] = None if master is None else master.detach()
        step = torch.tensor(float(get_steps(part)))
        if not isinstance(part, DistributedOptimizer):
            return {"step": step, **{name: value for name, value in held.items() if value is not None}}
        # A rank without any parameter gets the step from other ranks.
        step = step.to(parameter.device)
        dist.all_reduce(step, op=dist.ReduceOp.MAX, group=part.data_parallel_group)
        return {
            "step": step.cpu(),
            **{name: self._rows(parameter, value, part) for name, value in held.items()},
        }

    @torch.no_grad()
    def load(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Load a state, whole or in DTensors; without `master` in it, the master weight is the current parameter.

        A run in low precision may continue in fp32; the master weight then becomes the parameter.
        """
        self.optimizer.holds_states |= bool(state)
        part = self._part(parameter)
        if part is None:
            return
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}
        if not isinstance(part, DistributedOptimizer):
            source = whole.get("master", parameter)
            if source is not parameter:
                parameter.copy_(source)
        elif "master" in whole:
            parameter.copy_(whole["master"])
        master = self._master(parameter, part)
        if master is None:
            return

        def own(x: Tensor) -> Tensor:
            """Return this rank's range of a tensor of the parameter's shape."""
            if not isinstance(part, DistributedOptimizer):
                return x
            start, end = _ranges(parameter, part)[part.data_parallel_group.rank()]
            return x.reshape(-1)[start:end]

        if parameter.dtype != torch.float32:
            master.copy_(own(whole.get("master", parameter)))
        part.optimizer.state[master] = {
            name: own(whole[name]).detach().to(master.device, torch.float32, copy=True)
            for name in MOMENTS
            if name in whole
        }
        if "step" in whole:
            set_steps(part, int(whole["step"]), master)

    def tensors(self) -> Iterator[Tensor]:
        """Yield this rank's moments, and master weights that are not parameters themselves."""
        for chunk in self.optimizer.chunks:
            for parameter in chunk.parameters():
                part = self._part(parameter)
                master = None if part is None else self._master(parameter, part)
                if part is not None and master is not None:
                    if parameter.dtype != torch.float32:
                        yield master.detach()
                    slots = part.optimizer.state.get(master, {})
                    yield from (slots[name] for name in MOMENTS if name in slots)

    def _part(self, parameter: Tensor) -> Any | None:
        """Return the optimizer (of dense parameters or of experts) that updates a parameter."""
        for part in self._parts:
            if isinstance(part, DistributedOptimizer):
                if any(parameter in buffer.param_index_map for buffer in part.buffers):
                    return part
            elif part is self._masters.get(id(getattr(parameter, "main_param", parameter))):
                return part
        return None

    def _master(self, parameter: Tensor, part: Any) -> Tensor | None:
        """Return the tensor that AdamW updates; None if this rank holds nothing of the parameter."""
        if not isinstance(part, DistributedOptimizer):
            master: Tensor = getattr(parameter, "main_param", parameter)
            return master
        if parameter not in part.model_param_group_index_map:
            return None
        group, place = part.model_param_group_index_map[parameter]
        held: Tensor = part.optimizer.param_groups[group]["params"][place]
        return held

    def _rows(self, parameter: Tensor, mine: Tensor | None, part: DistributedOptimizer) -> DTensor:
        """Turn the ranges of the data-parallel ranks into rows; return this rank's rows."""
        group = part.data_parallel_group
        ranges = _ranges(parameter, part)
        width = max(end - start for start, end in ranges)
        sent = torch.zeros(width, device=parameter.device)
        if mine is not None:
            sent[: mine.numel()] = mine.flatten()
        received = torch.empty(len(ranges), width, device=parameter.device)
        dist.all_gather_into_tensor(received.view(-1), sent, group=group)
        whole = torch.cat([row[: end - start] for row, (start, end) in zip(received, ranges, strict=True)])
        whole = whole.view(parameter.shape)
        rows = -(-len(whole) // len(ranges))
        local = whole[group.rank() * rows : (group.rank() + 1) * rows].clone()
        if group not in self._meshes:
            self._meshes[group] = DeviceMesh.from_group(group, parameter.device.type)
        return DTensor.from_local(
            local, self._meshes[group], [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )


def _ranges(parameter: Tensor, part: DistributedOptimizer) -> list[tuple[int, int]]:
    """Return the range of the flattened parameter on each rank of the data-parallel group."""
    buffer = next(buffer for buffer in part.buffers if parameter in buffer.param_index_map)
    begin, end, number = buffer.param_index_map[parameter]
    bucket = buffer.buckets[number]
    size = part.data_parallel_group.size()
    shard = bucket.grad_data.numel() // size
    ranges = []
    for rank in range(size):
        start = bucket.offset + rank * shard
        first = min(max(start, begin), end)
        ranges.append((first - begin, max(min(start + shard, end), first) - begin))
    return ranges
