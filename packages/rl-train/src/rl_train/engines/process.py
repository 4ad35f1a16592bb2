"""Engines in other processes: `processes` starts them on this machine, and `EngineServer` is such a process.

A weight sync is one call "load" or several, each with a `WeightMessage`; "abort" ends it earlier.
A call "draw" is answered by the version of the weights that begin its responses, and by the complete responses; other
calls are answered meanwhile, between two steps.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

from rl_train.engines.interface import LocalEngine, StreamingEngine
from rl_train.processes.child import GPU_THREADS, Child
from rl_train.processes.host import Process, Transport
from rl_train.processes.times import START_SECONDS
from rl_train.processes.worker import Calls, ReceivedCall
from rl_train.weight_sync.receiver import WeightReceiver
from rl_train.weight_sync.transport import LOOPBACK, WeightMessage, device_id


def processes(
    make: Callable[[], LocalEngine], devices: Sequence[str], *, silence: float = 60.0, timeout: float = 1800.0
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
        env = {"CUDA_VISIBLE_DEVICES": device}
        if device:
            env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(GPU_THREADS)
        return Child("rl_train.engines.process:main", path=path, env=env)

    return [
        engine_process(
            f"engine {number} (device {device or 'cpu'})", partial(launch, device), (make,), silence, timeout
        )
        for number, device in enumerate(devices)
    ]


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
    EngineServer(calls, LOOPBACK).serve()


class EngineServer:
    """Hold an engine, and answer calls; other peers of a weight sync reach this process at `address`."""

    def __init__(self, calls: Calls, address: str) -> None:
        self._calls, self._receiver = calls, WeightReceiver(address)
        self._engine: LocalEngine
        # The calls "draw" that are not answered, by key. Draws pause from "expect" to the end of the weight sync.
        self._draws: dict[int, ReceivedCall] = {}
        self._keys, self._paused = itertools.count(), False

    def serve(self) -> None:
        """Answer calls until the caller is gone."""
        for call in self._between_steps():
            self._call = call
            try:
                if call.method == "draw":
                    key = next(self._keys)
                    cast(StreamingEngine, self._engine).add(key, *call.arguments())
                    self._draws[key] = call
                    continue
                result = self._result()
                self._call.answer(result)
            except BaseException as error:
                if self._call.method == "abort":
                    self._call.answer()
                else:
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
                self._draws[key].part(version)
            for key, responses in complete:
                self._draws.pop(key).answer(responses)
        except BaseException as error:
            for call in self._draws.values():
                call.fail(error)
            self._draws.clear()

    def _result(self) -> Any:
        match self._call.method:
            case "start":
                self._engine = self._call.arguments()[0]()
            case "ready":
                return device_id(), self._receiver.key
            case "generate":
                return self._engine.begin(*self._call.arguments())()
            case "load":
                with closing(self._receiver.receive(self._messages())) as named_tensors:
                    self._engine.load(named_tensors)
                    for name, _ in named_tensors:
                        raise RuntimeError(f"the engine did not take {name}")
                self._paused = False
            case "expect":
                cast(StreamingEngine, self._engine).expect(*self._call.arguments())
                self._paused = True
            case "sleep" | "wake" as method:
                getattr(self._engine, method)()
            case method:
                assert method == "abort", method
        return None

    def _messages(self) -> Iterator[WeightMessage]:
        """Yield the messages of a weight sync, and answer its calls but the last."""
        while not (message := self._call.arguments()[0]).last:
            yield message
            del message
            self._call.answer()
            self._call = next(self._calls)
            if self._call.method != "load":
                raise RuntimeError("the weight sync was aborted")
        yield message
