"""`SeparateEngine`: native engines for a run, on devices apart from the actor's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from parallel_layers import ParallelDims
from rl_models import Policy
from rl_train.engines.engine_on_ranks import EngineOnRanks
from rl_train.engines.engine_pool import EnginePool
from rl_train.engines.in_flight import InFlightPool
from rl_train.engines.interface import LocalEngine
from rl_train.engines.native import Native
from rl_train.engines.native_ranks import NativeRanks
from rl_train.engines.process import device_groups, processes


class SeparateEngine(EngineOnRanks):
    """Native engines for a run, each in a process on a device of its own; the first rank sends prompts and weights.

    Args:
        actor, model: See `EngineOnRanks`.
        devices: The ids of the devices, as in `CUDA_VISIBLE_DEVICES`; an empty id is a CPU.
        dims: The grid of an engine, which takes as many devices as it has ranks, in order (default: one).
        check: Compare a checksum of each tensor that goes to another process.
        timeout: See `processes`.
        in_flight: Take requests and weights while the engines draw, see `InFlightPool`.
        max_sequences: The number of responses that an engine draws side by side.
        **options: Further options of `Native`.

    Raises:
        ValueError: An engine does not start, or the grid's ranks do not divide the devices.
    """

    def __init__(
        self,
        actor: Policy,
        model: str | Path,
        *,
        devices: Sequence[str],
        dims: ParallelDims = ParallelDims(),  # noqa: B008
        check: bool = False,
        timeout: float = 1800.0,
        in_flight: bool = False,
        max_sequences: int = 512,
        **options: Any,
    ) -> None:
        groups = device_groups(devices, dims)
        options["max_sequences"] = max_sequences
        make: Callable[[], LocalEngine] = partial(Native, str(model), **options)
        if dims.world_size > 1:
            make = partial(NativeRanks, str(model), dims=dims, seconds=timeout, **options)

        def start() -> EnginePool:
            pool = InFlightPool if in_flight else EnginePool
            return pool(processes(make, groups, timeout=timeout), check=check, max_responses=max_sequences)

        super().__init__(actor, model, start, ranks=[0])
