"""`ParameterStates`: what an optimizer holds of one parameter, whatever divides it over data parallelism.

Megatron's distributed optimizer (ZeRO stage 1) lays parameters end to end and gives each data-parallel rank an equal
run of the whole, which begins and ends anywhere inside a parameter. Checkpoints speak of rectangles. So a state comes
out as a DTensor of the parameter's shape, rows divided over the data-parallel group, for which one parameter's ranges
are gathered at a time; and goes in as a whole tensor or such a DTensor, of which each rank keeps its range.
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
    """Masters, moments and step counts by parameter. With `OptimizerConfig.distributed` its methods are collective.

    Args:
        optimizer: of the run.
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
        """`step` (one element), `exp_avg`, `exp_avg_sq`, and of a bf16 or fp16 parameter `master`, all fp32.

        Empty for a frozen parameter, and before the first step or `load`. Shaped like the parameter; a DTensor with
        rows divided over data parallelism where the optimizer is distributed.
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
        # A rank may hold nothing of any parameter, and so know no step.
        step = step.to(parameter.device)
        dist.all_reduce(step, op=dist.ReduceOp.MAX, group=part.data_parallel_group)
        return {
            "step": step.cpu(),
            **{name: self._rows(parameter, value, part) for name, value in held.items()},
        }

    @torch.no_grad()
    def load(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Take over a state, whole or in DTensors; without a `master` in it, the master is the parameter as it is.

        What was trained in low precision may go on in fp32: its master is the parameter then.
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
            """This rank's range of a tensor of the parameter's shape."""
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
        """What this rank holds beside parameters and gradients: moments, and masters that are no parameters."""
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
        """The optimizer (of dense parameters or of experts) that steps a parameter."""
        for part in self._parts:
            if isinstance(part, DistributedOptimizer):
                if any(parameter in buffer.param_index_map for buffer in part.buffers):
                    return part
            elif part is self._masters.get(id(getattr(parameter, "main_param", parameter))):
                return part
        return None

    def _master(self, parameter: Tensor, part: Any) -> Tensor | None:
        """What AdamW changes; None where a distributed optimizer has nothing of the parameter on this rank."""
        if not isinstance(part, DistributedOptimizer):
            master: Tensor = getattr(parameter, "main_param", parameter)
            return master
        if parameter not in part.model_param_group_index_map:
            return None
        group, place = part.model_param_group_index_map[parameter]
        held: Tensor = part.optimizer.param_groups[group]["params"][place]
        return held

    def _rows(self, parameter: Tensor, mine: Tensor | None, part: DistributedOptimizer) -> DTensor:
        """This rank's rows of what the data-parallel ranks hold in ranges."""
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
    """Which elements of the flattened parameter each rank of the data-parallel group holds."""
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
