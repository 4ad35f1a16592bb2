"""`NativeRanks`: a native engine over several devices; the other ranks are processes below the engine's own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_layers import ParallelDims
from parallel_models import SamplingOptions
from rl_train.engines.interface import Request, Responses, Step
from rl_train.engines.native import Native
from rl_train.processes.child import Child
from rl_train.processes.errors import ProcessLost
from rl_train.processes.host import Call, Process
from rl_train.processes.times import LIFE_SECONDS, REPORT_SECONDS, START_SECONDS
from rl_train.processes.worker import Calls
from rl_train.weight_sync.buckets import Bucket, NamedTensors, in_buckets, unpack
from rl_train.weight_sync.transport import LOOPBACK


class NativeRanks:
    """A `StreamingEngine`: a model of `parallel_models` on a grid; this process is the first rank.

    It starts the other ranks. All ranks draw the same responses. When another rank ends, this process ends, too: the
    others' collectives would wait for it, and an `EnginePool` starts the engine again.

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
        make = partial(Native, str(model), dims=dims, **options)
        limits: dict[str, Any] = {
            "start_limit": seconds,
            "limit": seconds,
            "silence": 60.0,
            "first_sign": START_SECONDS,
        }
        launch = partial(Child, "rl_train.engines.native_ranks:main", path=[os.getcwd(), *filter(None, sys.path)])
        self._others = [
            Process(f"rank {rank}", launch, start=(make, meeting, rank), **limits) for rank in range(1, dims.world_size)
        ]
        self._closed = threading.Event()
        for other in self._others:
            other.start()
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            self._own = meeting.join(make, 0)
            for other in self._others:
                other.ready()
        except BaseException:
            self._end_others()
            raise

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """See `LocalEngine`."""
        return self._all("begin", lambda: self._own.begin(requests, sampling), requests, sampling)

    def load(self, named_tensors: NamedTensors) -> None:
        """See `LocalEngine`; each bucket is broadcast from this rank."""

        def send_and_load() -> None:
            with closing(_sent(named_tensors, self._own.device)) as stream:
                next(stream)  # from now on its end is told to the other ranks, however it comes
                self._own.load(stream)

        self._all("load", send_and_load)

    def add(self, key: int, request: Request, sampling: SamplingOptions) -> None:
        """See `StreamingEngine`."""
        self._all("add", lambda: self._own.add(key, request, sampling), key, request, sampling)

    def step(self) -> Step:
        """See `StreamingEngine`."""
        step: Step = self._all("step", self._own.step)
        return step

    def expect(self, version: int) -> None:
        """See `StreamingEngine`."""
        self._all("expect", lambda: self._own.expect(version), version)

    def sleep(self) -> None:
        """See `LocalEngine`."""
        self._all("sleep", self._own.sleep)

    def wake(self) -> None:
        """See `LocalEngine`."""
        self._all("wake", self._own.wake)

    def close(self) -> None:
        """See `LocalEngine`."""
        self._end_others()
        self._own.close()

    def _end_others(self) -> None:
        self._closed.set()
        for other in self._others:
            other.close()

    def _all(self, method: str, own: Callable[[], Any], *arguments: Any) -> Any:
        """Call a method on every rank; return this rank's result, or raise the first error."""
        waiting = [other.submit(method, *arguments) for other in self._others]
        try:
            result = own()
        except Exception:
            if any(map(_is_lost, waiting)):
                os._exit(1)
            raise
        for call in waiting:
            call.result()
        return result

    def _watch(self) -> None:
        """End this process when another rank is lost."""
        with suppress(ProcessLost):
            while not self._closed.wait(LIFE_SECONDS):
                for other in self._others:
                    other.submit("alive").result()
        if not self._closed.is_set():
            os._exit(1)


def main(pipe: Connection[Any, Any]) -> None:
    """Hold a rank of the engine and answer calls until the caller is gone; the main function of the process."""
    calls = Calls(pipe)
    calls.send_signs()
    own: Native
    for call in calls:
        match call.method:
            case "start":
                try:
                    make, meeting, rank = call.arguments()
                    own = meeting.join(make, rank)
                    call.answer()
                except BaseException as error:
                    call.fail(error)
            case "begin" | "step" as method:
                call.run(partial(_draw, getattr(own, method)))
            case "load":
                call.run(partial(_take, own))
            case "alive":
                call.answer()
            case method:
                call.run(getattr(own, method))


class _Meeting(NamedTuple):
    """Where the ranks of an engine meet: the port of a store on this machine, their number, and their time limit."""

    port: int
    size: int
    seconds: float

    def join(self, make: Callable[..., Native], rank: int) -> Native:
        """Form the default process group, and make the rank's part of the engine on the GPU of its number."""
        limit, has_gpu = timedelta(seconds=self.seconds), torch.cuda.is_available()
        store = dist.TCPStore(LOOPBACK, self.port, timeout=limit)  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
        if has_gpu:
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, store=store, rank=rank, world_size=self.size, timeout=limit)
        return make()


def _is_lost(call: Call) -> bool:
    """Say whether a call has lost its rank, or the rank waits in a collective that this rank has left."""
    try:
        return isinstance(call.exception(REPORT_SECONDS), ProcessLost)
    except TimeoutError:
        return True


def _draw(draw: Callable[..., Any], *arguments: Any) -> None:
    """Draw as the first rank does, which alone returns the responses."""
    draw(*arguments)


def _take(own: Native) -> None:
    """Load what the first rank sends, to its end also where a tensor is refused: the first rank sends until then."""
    stream = unpack(_received(own.device))
    try:
        own.load(stream)
    finally:
        for _ in stream:
            pass


def _sent(named_tensors: NamedTensors, device: torch.device) -> Generator[tuple[str, Tensor]]:
    """Yield an empty tensor, then those of buckets that have gone to the other ranks; the first rank calls this."""
    complete = False
    try:
        yield "", torch.empty(0)
        yield from unpack(_broadcast(in_buckets(named_tensors, check=False), device))
        complete = True
    finally:
        dist.broadcast_object_list([complete])


def _broadcast(buckets: Iterable[Bucket], device: torch.device) -> Iterator[Bucket]:
    """Yield buckets that have gone to the other ranks."""
    for bucket in buckets:
        dist.broadcast_object_list([bucket.entries])
        data = bucket.data.to(device)  # the ranks' group broadcasts between devices of one kind
        dist.broadcast(data, 0)
        yield Bucket(bucket.entries, data[None], 0)


def _received(device: torch.device) -> Iterator[Bucket]:
    """Yield what `_broadcast` yields, on the other ranks; RuntimeError where the first rank's stream has broken off."""
    message: list[Any] = [None]
    while True:
        dist.broadcast_object_list(message)
        if isinstance(message[0], bool):
            break
        ring = torch.empty(1, message[0][-1].end, dtype=torch.uint8, device=device)
        dist.broadcast(ring, 0)
        yield Bucket(message[0], ring, 0)
    if not message[0]:
        raise RuntimeError("the weight sync was aborted")
