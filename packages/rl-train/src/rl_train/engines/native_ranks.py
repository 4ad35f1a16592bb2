"""`NativeRanks`: a native engine over several devices; the other ranks are processes below the engine's own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ckpt.transfer import TargetShards
from parallel_layers import ParallelDims
from parallel_layers.device import GPU, gpu
from parallel_models import SamplingOptions
from rl_train.engines.interface import Request, Responses, Step
from rl_train.engines.native import Native
from rl_train.engines.process import engine_process, load_into
from rl_train.processes.child import Child
from rl_train.processes.errors import ProcessLost
from rl_train.processes.host import Call
from rl_train.processes.times import LIFE_SECONDS, REPORT_SECONDS
from rl_train.processes.worker import Calls
from rl_train.weight_sync.buckets import NamedTensors
from rl_train.weight_sync.receiver import WeightReceiver
from rl_train.weight_sync.sender import WeightSender, WorkersOf
from rl_train.weight_sync.transport import LOOPBACK, BucketMissed, WeightMessage, device_id


class NativeRanks:
    """A native engine (`Native`) on a grid, and a `WorkerEngine`; this process is the first rank.

    It starts the other ranks. All ranks draw the same responses, and each receives its weights. When another rank ends,
    this process ends, too: the others' collectives would wait for it, and an `EnginePool` starts the engine again.

    Args:
        model: The checkpoint folder.
        dims: The grid; tp, pp and ep. Rank r takes the r-th visible GPU.
        seconds: The time limit of a call, and of the group's collectives.
        **options: See `Native`.

    Raises:
        ValueError: The grid has dp or cp, or as `Native`.
    """

    def __init__(self, model: str | Path, *, dims: ParallelDims, seconds: float = 1800.0, **options: Any) -> None:
        if dims.dp * dims.cp > 1:
            raise ValueError(f"dims={dims}: a native engine is one model on tp, pp and ep; give more devices for more")
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK, 0, is_master=True, wait_for_workers=False
        )
        meeting = _Meeting(self._store.port, dims.world_size, seconds)
        make = partial(_Rank, str(model), dims=dims, **options)
        launch = partial(Child, "rl_train.engines.native_ranks:main", path=[os.getcwd(), *filter(None, sys.path)])
        self._others = [
            engine_process(f"rank {rank}", launch, (make, meeting, rank), 60.0, seconds)
            for rank in range(1, dims.world_size)
        ]
        self._closed, self._sender = threading.Event(), WeightSender()
        for other in self._others:
            other.start()
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            self._first = meeting.join(make, 0)
            for other in self._others:
                other.ready()
            self._receivers: list[tuple[str, str]] = self._call("receiver")
        except BaseException:
            self._end_others()
            raise

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """See `LocalEngine`."""
        answer: Callable[[], Responses] = self._call("begin", requests, sampling)[0]
        return answer

    def load(self, named_tensors: NamedTensors) -> None:
        """See `LocalEngine`."""
        self._sender.sync([WorkersOf(self)], named_tensors)

    def receivers(self) -> list[tuple[str, str]]:
        """See `WorkerEngine`; each rank receives weights."""
        return self._receivers

    def receive(self, messages: Sequence[WeightMessage]) -> None:
        """See `WorkerEngine`."""
        calls = [other.submit("receive", message) for other, message in zip(self._others, messages[1:], strict=True)]
        _results(calls, lambda: self._first.receive(messages[0]))

    def shards(self) -> list[TargetShards]:
        """See `ShardedEngine`."""
        return [each for shards in self._call("shards") for each in shards]

    def add(self, key: int, request: Request, sampling: SamplingOptions) -> None:
        """See `StreamingEngine`."""
        self._call("add", key, request, sampling)

    def step(self) -> Step:
        """See `StreamingEngine`."""
        step: Step = self._call("step")[0]
        return step

    def cancel(self, key: int) -> None:
        """See `StreamingEngine`."""
        self._call("cancel", key)

    def expect(self, version: int) -> None:
        """See `StreamingEngine`."""
        self._call("expect", version)

    def sleep(self) -> None:
        """See `LocalEngine`."""
        self._call("sleep")

    def wake(self) -> None:
        """See `LocalEngine`."""
        self._call("wake")

    def close(self) -> None:
        """See `LocalEngine`."""
        self._sender.close()
        self._end_others()
        self._first.close()

    def _end_others(self) -> None:
        self._closed.set()
        for other in self._others:
            other.close()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every rank; return the result of each rank, or raise the first error."""
        calls = [other.submit(method, *arguments) for other in self._others]
        return _results(calls, partial(getattr(self._first, method), *arguments))

    def _watch(self) -> None:
        """End this process when another rank is lost."""
        with suppress(ProcessLost):
            while not self._closed.wait(LIFE_SECONDS):
                for other in self._others:
                    other.submit("alive").result()
        if not self._closed.is_set():
            os._exit(1)


def native_engine(model: str, *, dims: ParallelDims, seconds: float, **options: Any) -> Native | NativeRanks:
    """Return a native engine on one device, or on a grid; see `NativeRanks`."""
    if dims.world_size == 1:
        return Native(model, **options)
    return NativeRanks(model, dims=dims, seconds=seconds, **options)


def main(pipe: Connection[Any, Any]) -> None:
    """Hold a rank of the engine and answer calls until the caller is gone; the main function of the process."""
    calls = Calls(pipe)
    calls.send_signs()
    engine: _Rank
    for call in calls:
        match call.method:
            case "start":
                try:
                    make, meeting, rank = call.arguments()
                    engine = meeting.join(make, rank)
                    call.answer()
                except BaseException as error:
                    call.fail(error)
            case "begin" | "step" as method:
                call.run(partial(_draw, getattr(engine, method)))
            case "alive":
                call.answer()
            case method:
                call.run(getattr(engine, method))


class _Rank(Native):
    """A rank of the engine, which receives weights itself."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._receiver = WeightReceiver()

    def receiver(self) -> tuple[str, str]:
        """Return the id of this rank's device, and the key of its receiver."""
        return device_id(self.device), self._receiver.key

    def receive(self, message: WeightMessage) -> None:
        """Take a weight sync."""
        load_into(self, self._receiver, message)


class _Meeting(NamedTuple):
    """The store where the ranks of an engine meet: its port on this machine, their number, and their time limit."""

    port: int
    size: int
    seconds: float

    def join(self, make: Callable[..., _Rank], rank: int) -> _Rank:
        """Form the default process group, and make the rank's part of the engine on the GPU of its number."""
        limit, has_gpu = timedelta(seconds=self.seconds), gpu.is_available()
        store = dist.TCPStore(LOOPBACK, self.port, timeout=limit)  # type: ignore[attr-defined]
        backend = f"cpu:gloo,{GPU}:nccl" if has_gpu else "gloo"
        if has_gpu:
            gpu.set_device(rank)
        dist.init_process_group(backend, store=store, rank=rank, world_size=self.size, timeout=limit)
        return make()


def _results(calls: Sequence[Call], local: Callable[[], Any]) -> list[Any]:
    """Call a function on this rank beside calls of the others; return all results, or raise the error with a cause."""
    errors = list[BaseException]()
    result = None
    try:
        result = local()
    except Exception as error:
        if any(map(_is_lost, calls)):
            os._exit(1)
        errors.append(error)
    errors += filter(None, [call.exception() for call in calls])
    if errors:
        raise min(errors, key=lambda error: isinstance(error, BucketMissed))
    return [result, *(call.result() for call in calls)]


def _is_lost(call: Call) -> bool:
    """Say whether a call has lost its rank, or the rank waits in a collective that this rank has left."""
    try:
        return isinstance(call.exception(REPORT_SECONDS), ProcessLost)
    except TimeoutError:
        return True


def _draw(draw: Callable[..., Any], *arguments: Any) -> None:
    """Draw as the first rank does, which alone returns the responses."""
    draw(*arguments)
