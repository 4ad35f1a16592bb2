"""Engines in other processes: `processes` starts them on this machine, and `EngineServer` is such a process.

A weight sync is one call "load" or several, each with a `WeightMessage`; "abort" ends it earlier.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from rl_train.engines.interface import LocalEngine
from rl_train.processes.child import Child
from rl_train.processes.host import Process, Transport
from rl_train.processes.times import START_SECONDS
from rl_train.processes.worker import Calls
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
        return Child("rl_train.engines.process:main", path=path, env={"CUDA_VISIBLE_DEVICES": device})

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

    def serve(self) -> None:
        """Answer calls until the caller is gone."""
        for call in self._calls:
            self._call = call
            try:
                result = self._result()
                self._call.answer(result)
            except BaseException as error:
                if self._call.method == "abort":
                    self._call.answer()
                else:
                    self._call.fail(error)

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
