"""Engines in other processes: `processes` starts them on this machine, and `EngineServer` is such a process.

A weight sync is one call "load", with a `WeightMessage` for each process of the engine that receives weights.
The answer to "shards" has what these processes hold; it is empty for an engine that takes whole tensors.
A call "draw" is answered by the version of the weights that begin its responses, and by the complete responses; other
calls are answered meanwhile, between two steps. A call "cancel" ends a call "draw", by its number.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from traceback import clear_frames
from typing import Any, cast

from parallel_layers import ParallelDims
from parallel_layers.device import VISIBLE_DEVICES, gpu
from rl_train.engines.interface import (
    EngineEnded,
    LocalEngine,
    ReadingEngine,
    ShardedEngine,
    StreamingEngine,
    WorkerEngine,
)
from rl_train.processes.child import GPU_THREADS, Child
from rl_train.processes.host import Process, Transport
from rl_train.processes.times import START_SECONDS
from rl_train.processes.worker import Calls, ReceivedCall
from rl_train.weight_sync.receiver import WeightReceiver
from rl_train.weight_sync.transport import WeightMessage, device_id


def processes(
    make: Callable[[], LocalEngine | ReadingEngine],
    devices: Sequence[str],
    *,
    silence: float = 60.0,
    timeout: float = 1800.0,
) -> list[Process]:
    """Return engines for `EnginePool`, each in a process of this machine; `EnginePool` starts the processes.

    Args:
        make: Makes the engine in its process; pickled, so a function of a module or a `partial` of it.
        devices: `CUDA_VISIBLE_DEVICES` of each engine; one process each.
        silence: The seconds without a sign of life after which the process hangs, and the time limit of a bucket.
        timeout: The seconds after which a call has taken too long, the start of the engine included.
    """

    def launch(device: str) -> Child:
        path = [os.getcwd(), *filter(None, sys.path)]
        env = {VISIBLE_DEVICES: device}
        if device:
            env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(GPU_THREADS)
        return Child("rl_train.engines.process:main", path=path, env=env)

    return [
        engine_process(
            f"engine {number} (device {device or 'cpu'})", partial(launch, device), (make,), silence, timeout
        )
        for number, device in enumerate(devices)
    ]


def device_groups(devices: Sequence[str], dims: ParallelDims) -> list[str]:
    """Return the `devices` of `processes` for engines that take as many devices each as their grid has ranks, in order.

    Raises:
        ValueError: The grid's ranks do not divide the devices.
    """
    size = dims.world_size
    if not devices or len(devices) % size:
        raise ValueError(f"{len(devices)} devices are no multiple of the {size} ranks of {dims}; give more, or fewer")
    groups = [devices[start : start + size] for start in range(0, len(devices), size)]
    for group in groups:
        if any(group) and len(set(filter(None, group))) < size:
            named = ",".join(device or "cpu" for device in group)
            raise ValueError(f"the devices {named} of an engine of {dims} must be {size} GPUs, each once, or cpu alone")
    return [",".join(filter(None, group)) for group in groups]


def engine_process(
    name: str,
    launch: Callable[[], Transport],
    start: tuple[Any, ...] | None,
    silence: float,
    timeout: float,
    dumps: Callable[[Any], bytes] = pickle.dumps,
) -> Process:
    """Return an engine in another process; see `processes` and `Process`."""
    limits = {"start_limit": timeout, "limit": timeout, "silence": silence, "first_sign": START_SECONDS}
    return Process(name, launch, start=start, **limits, dumps=dumps)


def main(pipe: Connection[Any, Any]) -> None:
    """Hold an engine and answer calls until the caller is gone; the main function of the process."""
    calls = Calls(pipe)
    calls.send_signs()
    EngineServer(calls).serve()


class EngineServer:
    """Hold an engine, and answer calls."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._receiver = calls, WeightReceiver()
        self._engine: LocalEngine
        # Calls "ready" from before the start: on Ray another process than the one that starts the engine sends weights.
        # None: the engine has started.
        self._early: list[ReceivedCall] | None = []
        # The calls "draw" that are not answered, by number. Draws pause from "expect" to the end of the weight sync.
        self._draws, self._paused = dict[int, ReceivedCall](), False

    def serve(self) -> None:
        """Answer calls until the caller is gone."""
        for call in self._between_steps():
            self._call = call
            try:
                if call.method == "ready" and self._early is not None:
                    self._early.append(call)
                    continue
                if call.method == "draw":
                    cast(StreamingEngine, self._engine).add(call.number, *call.arguments())
                    self._draws[call.number] = call
                    continue
                self._call.answer(self._result())
            except EngineEnded:
                os._exit(1)
            except BaseException as error:
                self._call.fail(error)

    def _between_steps(self) -> Iterator[ReceivedCall]:
        """Yield the calls; draw while none waits."""
        while True:
            while self._draws and not self._paused and not self._calls.waiting:
                self._step()
            if (call := next(self._calls, None)) is None:
                return
            yield call

    def _step(self) -> None:
        try:
            begun, complete = cast(StreamingEngine, self._engine).step()
            for key, version in begun:
                if key in self._draws:  # an engine may tell the begin of a request after its end by "cancel"
                    self._draws[key].part(version)
            for key, responses in complete:
                self._draws.pop(key).answer(responses)
        except EngineEnded:
            os._exit(1)
        except BaseException as error:
            for call in self._draws.values():
                call.fail(error)
            self._draws.clear()

    def _result(self) -> Any:
        match self._call.method:
            case "start":
                _require_gpus()
                self._engine = self._call.arguments()[0]()
                early, self._early = self._early or [], None
                for call in early:
                    call.answer(self._ready())
            case "ready":
                return self._ready()
            case "generate":
                return self._engine.begin(*self._call.arguments())()
            case "read":
                return cast(ReadingEngine, self._engine).read(*self._call.arguments())
            case "shards":
                return getattr(self._engine, "shards", list)()
            case "load":
                self._load(*self._call.arguments())
                self._paused = False
            case "cancel":
                (number,) = self._call.arguments()
                # On Ray the number of a call begins with its caller.
                key = number if isinstance(self._call.number, int) else (*self._call.number[:-1], number)
                if (draw := self._draws.pop(key, None)) is not None:
                    cast(StreamingEngine, self._engine).cancel(key)
                    draw.answer([])
            case "expect":
                cast(StreamingEngine, self._engine).expect(*self._call.arguments())
                self._paused = True
            case method:
                assert method in ("sleep", "wake"), method
                getattr(self._engine, method)()
        return None

    def _ready(self) -> list[tuple[str, str]]:
        """Return the device and the key of each process that receives weights."""
        return self._receivers() or [(device_id(), self._receiver.key)]

    def _receivers(self) -> list[tuple[str, str]]:
        """Return the receivers of an engine whose worker processes receive weights; none for other engines."""
        receivers: list[tuple[str, str]] = getattr(self._engine, "receivers", list)()
        return receivers

    def _load(self, messages: list[WeightMessage]) -> None:
        if self._receivers():
            cast(WorkerEngine, self._engine).receive(messages)
            return
        load_into(self._engine, self._receiver, messages[0])


def _require_gpus() -> None:
    """Raise ValueError unless torch sees each GPU that the caller has named, without which the engine took the CPU."""
    ids = list(filter(None, os.environ.get(VISIBLE_DEVICES, "").split(",")))
    if ids and (count := gpu.device_count()) < len(ids):
        raise ValueError(
            f"an engine gets the GPUs {','.join(ids)}, and torch finds {count} of them; give ids of GPUs of this "
            "machine, each once, or cpu"
        )


def load_into(engine: LocalEngine, receiver: WeightReceiver, message: WeightMessage) -> None:
    """Take a weight sync in the process of an engine: boxes of its shards, or whole tensors."""
    if message.shards:
        try:
            cast(ShardedEngine, engine).fill(partial(receiver.fill, message))
        except BaseException as error:
            clear_frames(error.__traceback__)  # they keep operations, and these the group
            receiver.close()  # the other processes wait for this one
            raise
        return
    with closing(receiver.receive(message)) as named_tensors:
        engine.load(named_tensors)
        for name, _ in named_tensors:
            raise RuntimeError(f"the engine did not take {name}")
