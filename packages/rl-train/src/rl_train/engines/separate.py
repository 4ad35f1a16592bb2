"""`SeparateEngine`: native engines for a run, on devices apart from the actor's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from parallel_layers import ParallelDims
from rl_models import Policy
from rl_train.cluster.machines import Machines
from rl_train.engines.engine_on_ranks import EngineOnRanks
from rl_train.engines.engine_pool import EnginePool
from rl_train.engines.in_flight import InFlightPool
from rl_train.engines.native_ranks import native_engine
from rl_train.engines.process import device_groups, processes
from rl_train.processes.host import Process
from rl_train.weight_sync.shard_sender import NoShards, ShardSender
from rl_train.weight_sync.transport import BucketMissed


class SeparateEngine(EngineOnRanks):
    """Native engines for a run, each in a process on a device of its own.

    The first rank of the actor sends the prompts, and each rank the weights that it holds.

    Args:
        actor, model: See `EngineOnRanks`.
        devices: The ids of the devices of the first machine, as in `CUDA_VISIBLE_DEVICES`; an empty id is a CPU.
        dims: The grid of an engine, which takes as many devices as it has ranks, in order (default: one).
        check: Compare checksums of the weights that go to another process.
        bucket_bytes, changed_only: See `ShardSender`.
        timeout: See `processes`.
        in_flight: Take requests and weights while the engines draw, see `InFlightPool`.
        max_sequences: The number of responses that an engine draws side by side.
        **options: Further options of `Native`.

    Attributes:
        shards: This rank's sender; None where the engines take whole tensors.

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
        bucket_bytes: int | None = None,
        changed_only: bool = False,
        timeout: float = 1800.0,
        in_flight: bool = False,
        max_sequences: int = 512,
        **options: Any,
    ) -> None:
        groups = device_groups(devices, dims)
        options["max_sequences"] = max_sequences
        make = partial(native_engine, str(model), dims=dims, seconds=timeout, **options)

        def start() -> EnginePool:
            pool = InFlightPool if in_flight else EnginePool
            engines = processes(make, groups, timeout=timeout)
            return pool(engines, check=check, bucket_bytes=bucket_bytes, max_responses=max_sequences)

        address = Machines.here().address
        self.shards: ShardSender | None = ShardSender(check, bucket_bytes, address, changed_only=changed_only)
        super().__init__(actor, model, start, ranks=[0])

    def _send(self) -> Exception | None:
        """Send the weights from shard to shard; as whole tensors where an engine shares a GPU with the actor."""
        sender, pool, called = self.shards, self._local, False
        if sender is None:
            return super()._send()

        def send(engines: Sequence[Process]) -> None:
            nonlocal called
            called = True
            sender.sync(self._actor, engines)

        try:
            if isinstance(pool, EnginePool):
                pool.load_by(send)
            else:
                sender.sync(self._actor, None)
        except NoShards:
            self.shards = None
            return super()._send()
        except Exception as error:
            if pool is not None and not called:
                with suppress(BucketMissed):  # tell the other ranks
                    sender.sync(self._actor, None)
            return error
        return None

    def close(self) -> None:
        """See `RolloutEngine`."""
        if self.shards is not None:
            self.shards.close()
        super().close()
