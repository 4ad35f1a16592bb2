"""`EngineOnRay`: a `RolloutEngine` for a group on a Ray cluster; its engines are Ray actors on separate devices."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from ckpt.transfer import rank_in
from parallel_layers import ParallelDims
from rl_models import Grid
from rl_train.cluster.group import RayModelGroup
from rl_train.cluster.placement import Share
from rl_train.cluster.ranks import kill, process_environment
from rl_train.cluster.resources import import_ray
from rl_train.engines.engine_on_ranks import EngineOnRanks, stream_to_engine
from rl_train.engines.engine_pool import EnginePool
from rl_train.engines.interface import LocalEngine, WeightsLostError
from rl_train.engines.rpc import LIFE_SECONDS, Answer, EngineLostError, RemoteEngine, serve
from rl_train.weight_sync.buckets import BUCKET_BYTES, NamedTensors, WeightFormat
from rl_train.weight_sync.sender import LostEngines, sync_weights


class EngineOnRay(EngineOnRanks):
    """A `RolloutEngine` of a program whose actor is a `RayModelGroup`: a group of engines, each a Ray actor.

    The group's first rank sends the weights, see `sync_weights`; no tensor passes the program. See `EnginePool` for the
    division of requests, and for engines that are lost.

    Args:
        actor: The `RayModelGroup` of an `Actor`.
        model: See `EngineOnRanks`; every node must see this folder.
        make: Makes an engine in its process, such as `partial(Vllm, model)`; pickled by cloudpickle.
        share: The devices, one engine on each device of the placement: `Placement(4).share(1.0)` for engines apart, or
            a share of the placement that the actor has, too.
        sleeps, version, weight_format: See `EngineOnRanks`.
        silence, timeout: See `RemoteEngine`.
        check, bucket_bytes, **options: See `EnginePool`.

    Raises:
        ValueError: The placement has less room than the share, or see `EnginePool`.
    """

    def __init__(
        self,
        actor: RayModelGroup,
        model: str | Path,
        make: Callable[[], LocalEngine],
        share: Share,
        *,
        sleeps: bool = False,
        version: int = 0,
        weight_format: WeightFormat | None = None,
        silence: float = 60.0,
        timeout: float = 1800.0,
        check: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        **options: Any,
    ) -> None:
        self._share, self._check = share, check
        self._bundles = share.take(len(share.placement), 1)
        engines = [
            RayEngine(f"engine {number}", make, share, bundle, silence, timeout)
            for number, bundle in enumerate(self._bundles)
        ]
        program = Grid(ParallelDims(), torch.device("cpu"))

        def start() -> EnginePool:
            self._pool = EnginePool(engines, **options)
            return self._pool

        try:
            super().__init__(
                actor,
                model,
                start,
                sleeps=sleeps,
                version=version,
                bucket_bytes=bucket_bytes,
                grid=program,
                weight_format=weight_format,
            )
        except BaseException:
            self._give_back()
            raise

    def close(self) -> None:
        """See `RolloutEngine`."""
        super().close()
        self._give_back()

    def _give_back(self) -> None:
        self._share.give_back(self._bundles)
        self._bundles = []

    def _stream(self) -> bool:
        """Have the group's ranks stream their weights into the engines; say if all engines were lost."""

        def send(engines: Sequence[RemoteEngine]) -> LostEngines:
            options = {"check": self._check, "bucket_bytes": self._bucket_bytes}
            failure, lost_engines = self._actor.apply(_send, engines, self._weight_format, **options)[0]
            if failure is not None:
                raise failure
            return lost_engines

        try:
            self._pool.load_by(send)
        except WeightsLostError:
            return True
        return False


def _send(
    worker: Any, engines: Sequence[RemoteEngine], weight_format: WeightFormat, *, check: bool, bucket_bytes: int
) -> tuple[Exception | None, LostEngines]:
    """Stream a rank's weights, from the first rank to the engines; return an engine's error, and the lost engines."""
    lost_engines: LostEngines = {}

    def load(named_tensors: NamedTensors) -> None:
        address = import_ray().util.get_node_ip_address()
        lost_engines.update(
            sync_weights(engines, named_tensors, check=check, bucket_bytes=bucket_bytes, address=address)
        )

    first = rank_in(worker.grid.everyone) == 0
    failure = stream_to_engine(worker, load if first else None, weight_format, to=[0], bucket_bytes=bucket_bytes)
    return failure, lost_engines


class RayEngine(RemoteEngine):
    """An engine in a Ray actor on a bundle of a placement. A copy in another process calls the same actor."""

    def __init__(
        self, name: str, make: Callable[[], LocalEngine], share: Share, bundle: int, silence: float, timeout: float
    ) -> None:
        super().__init__(name, silence, timeout)
        self.label = name

        def launch() -> Any:
            # Calls come one at a time; a separate thread sends signs of life.
            kind = import_ray().remote(max_restarts=0, max_task_retries=0, concurrency_groups={"life": 1})(RayHost)
            env = {"env_vars": process_environment(name, share)}
            return kind.options(runtime_env=env, **share.options(bundle)).remote(make, share.placement.accelerator)

        self._launch: Callable[[], Any] | None = launch
        self._host: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_launch": None}

    def start(self) -> None:
        """See `RemoteEngine`."""
        super().start()
        assert self._launch is not None
        self.name, self._host = self.label, self._launch()

    def end(self) -> None:
        """See `RemoteEngine`."""
        if self._host is not None:
            kill([self._host])

    def _ask(self, method: str, args: Sequence[Any]) -> list[Any]:
        return [self._host.call.remote(method, *args), self._sign()]

    def _sign(self) -> Any:
        return self._host.live.options(concurrency_group="life").remote()

    def _listen(self, asked: list[Any], method: str) -> list[Answer | None]:
        ray, (answer, sign) = import_ray(), asked
        ready, _ = ray.wait([answer], timeout=LIFE_SECONDS)
        try:
            if ready:
                place, error, result = ray.get(answer)
                message: Answer | None = (error, result)
            elif ray.wait([sign], timeout=0)[0]:
                place, message, asked[1] = ray.get(sign), None, self._sign()
            else:
                return []
        except ray.exceptions.RayError as failure:
            why = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0]}"
            raise EngineLostError(f"{self.name} ended during {method} ({why})") from failure
        self.name = f"{self.label} ({place})"
        return [message]


class RayHost:
    """The Ray actor of an engine. A thread holds the engine, so that a call can end in the middle of a weight sync."""

    def __init__(self, make: Callable[[], LocalEngine], accelerator: str) -> None:
        if accelerator == "CPU":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        ray = import_ray()
        ids = ray.get_runtime_context().get_accelerator_ids().get(accelerator, [])
        address = ray.util.get_node_ip_address()
        self._place = ", ".join([f"node {address}", *(f"{accelerator} {id}" for id in ids)])
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()

        def run() -> None:
            try:
                serve(make, self._calls.get, self._answers.put, address)
            finally:
                os._exit(1)  # without this thread (after SystemExit, say) no call would get an answer

        threading.Thread(target=run, daemon=True).start()

    def call(self, method: str, *args: Any) -> tuple[str, Exception | None, Any]:
        """Call a method of the engine, see `serve`; return the place of this process, an error and the result."""
        self._calls.put((method, args))
        return self._place, *self._answers.get()

    def live(self) -> str:
        """Return the place of this process: a sign of life."""
        return self._place
