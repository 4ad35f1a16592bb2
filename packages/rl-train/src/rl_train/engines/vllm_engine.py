"""`VllmEngine`: vLLM for all ranks of an actor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt.transfer import adapter_config
from parallel_layers import ParallelDims
from parallel_layers.device import VISIBLE_DEVICES
from parallel_layers.model import LoraOptions
from parallel_models.engine import describe
from rl_models import Policy
from rl_train.engines.engine_on_ranks import EngineOnRanks
from rl_train.engines.engine_pool import EnginePool
from rl_train.engines.in_flight import InFlightPool
from rl_train.engines.process import device_groups, processes
from rl_train.engines.vllm import Vllm
from rl_train.engines.vllm_limits import require_vllm
from rl_train.weight_sync.buckets import WeightFormat


class VllmEngine(EngineOnRanks):
    """vLLM for a run; its engines share the actor's devices, or have separate devices.

    Each rank of the actor has an engine with all weights, in separate processes on the rank's device, and answers a
    part of the prompts. With `devices`, the engines run apart from the actor: the first rank sends them the prompts and
    the weights.

    Args:
        actor, model: See `EngineOnRanks`.
        devices: The ids of devices for engines apart, as in `CUDA_VISIBLE_DEVICES`; an empty id is a CPU (default: the
            actor's own devices).
        dims: The grid of an engine, see `Vllm`; each takes as many of the `devices` as it has ranks (default: one).
        check: Compare a checksum of each tensor that goes to another process.
        timeout: See `processes`.
        in_flight: Take requests and weights while the engines draw, see `InFlightPool`; with `devices`.
        lora: The options of the actor's adapters, to hand these over alone (default: all weights, adapters merged).
        **options: See `Vllm`: `memory`, `dtype`, `quantization`, `routing`, `stale_cache`, and further options of vLLM.

    Raises:
        ValueError: vLLM is not installed, an engine does not start, or the grid's ranks do not divide the devices.
    """

    def __init__(
        self,
        actor: Policy,
        model: str | Path,
        *,
        devices: Sequence[str] | None = None,
        dims: ParallelDims = ParallelDims(),  # noqa: B008
        check: bool = False,
        timeout: float = 1800.0,
        in_flight: bool = False,
        lora: LoraOptions | None = None,
        **options: Any,
    ) -> None:
        require_vllm()
        weight_format = WeightFormat.of_weights(model, options.get("quantization"))
        if lora is not None:
            weight_format, options["adapter"] = adapters_of(lora, model)
        if devices is None and dims.world_size > 1:
            raise ValueError(f"an engine on the grid {dims} needs devices of its own: give devices, or leave dims out")
        groups = None if devices is None else device_groups(devices, dims)
        make = partial(Vllm, str(model), dims=dims, **options)

        def start_pool() -> EnginePool:
            engines = processes(make, groups or [visible_device(actor)], timeout=timeout)
            return (InFlightPool if in_flight else EnginePool)(
                engines, check=check, max_responses=options.get("max_num_seqs", 512)
            )

        ranks = None if devices is None else [0]
        sleeps = devices is None
        super().__init__(actor, model, start_pool, ranks=ranks, sleeps=sleeps, weight_format=weight_format)


def adapters_of(lora: LoraOptions, model: str | Path) -> tuple[WeightFormat, dict[str, Any]]:
    """Return the format of a sync of adapters alone, and the `adapter` of `Vllm`."""
    layout = describe(lora, ckpt.layout_for(model), str(model)).layout
    return WeightFormat.of_adapters(layout), adapter_config(layout)


def visible_device(actor: Policy) -> str:
    """Return the id of the actor's device on this rank, as in `CUDA_VISIBLE_DEVICES`; empty for a CPU."""
    device: torch.device = actor.grid.device
    if device.type == "cpu":
        return ""
    visible = os.environ.get(VISIBLE_DEVICES, "")
    index = device.index or 0
    return visible.split(",")[index] if visible else str(index)
