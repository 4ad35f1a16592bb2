"""`Throughput`: tokens per second and device, and the share of the devices' peak that the models' FLOPs are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ckpt import Checkpoint, Role
from parallel_models.engine import stored_dtype
from rl_models import Batch
from rl_models.api import ModelCalls
from rl_train.cluster.launch import Devices
from rl_train.loop.model_swapper import AnnouncedCalls
from rl_train.options.run_options import RunOptions
from rl_train.planner.flops import ModelFlops, peak_flops

# Methods of a model that run a forward and a backward; others with a batch run a forward alone.
_UPDATES = ("update", "forward_backward")


class Throughput:
    """Counts the FLOPs of the models of a run, and compares them with the peak of its devices.

    `devices` are those of the policy and of the engines beside it, and `ranks` those of the policy. `peak` is the peak
    FLOP/s of a device in the run's dtype; None: unknown, and then no FLOPs are counted. `tell` is called once
    with a message if the run has no MFU on its accelerators.
    """

    def __init__(self, options: RunOptions, tell: Callable[[Mapping[str, Any]], None] = lambda event: None) -> None:
        self._tell = tell
        self.devices, self.ranks = options.num_devices, options.grid.world_size
        device = Devices.find(options.device).current
        self.peak: float | None = None
        if device.type != "cpu":
            name = torch.get_device_module(device).get_device_name(device)
            dtype = options.engine.dtype or stored_dtype(Checkpoint(options.model))
            self.peak = peak_flops(name, dtype)
            if self.peak is None:
                tell({"message": f"no MFU: the peak of {name} in {str(dtype).removeprefix('torch.')} is not known"})
        self._policy: ModelFlops | None = None
        self._flops = Counter[str]()

    def counted(self, model: ModelCalls, checkpoint: Checkpoint, role: Role, lora: Any) -> ModelCalls:
        """Return the calls of a model with their FLOPs counted; the first model is the policy."""
        if self.peak is None:
            return model
        try:
            flops = ModelFlops.of(checkpoint, role, lora)
        except ValueError:  # a family that only another backend knows
            self.peak = None
            self._tell({"message": f"no MFU: the FLOPs of {checkpoint.path} are not known"})
            return model
        self._policy = self._policy or flops
        return AnnouncedCalls(model, partial(self._count, flops))

    def _count(self, flops: ModelFlops, method: str, args: tuple[Any, ...]) -> None:
        if args and isinstance(batch := args[0], Batch):
            updates = method in _UPDATES
            count = flops.update if updates else flops.forward
            self._flops["updates" if updates else "forwards"] += count(batch.lengths)  # type: ignore[assignment]

    def begin(self) -> None:
        """Begin a step."""
        self._flops.clear()

    def describe(
        self, values: Mapping[str, float], seconds: Mapping[str, float], lengths: Sequence[int]
    ) -> dict[str, float]:
        """Return the metrics of a step.

        Args:
            values: `tokens` and `seconds` of the step.
            seconds: The seconds of each phase, `seconds_<name>`.
            lengths: The lengths of the sequences that engines drew.
        """
        rates = {"tokens_per_second_per_device": values["tokens"] / values["seconds"] / self.devices}
        if self.peak is None or self._policy is None:
            return rates
        step = self._flops.total() + self._policy.forward(lengths)
        rates["mfu"] = step / (values["seconds"] * self.devices * self.peak)
        learning = seconds.get("seconds_learning", 0.0) * self.ranks * self.peak
        return rates | ({"mfu_learning": self._flops["updates"] / learning} if learning else {})
