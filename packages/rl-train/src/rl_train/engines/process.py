"""`EngineProcess`: an engine in a process of this machine, on a separate device; a pipe carries the messages."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rl_train.engines.interface import LocalEngine
from rl_train.engines.rpc import LIFE_SECONDS, Answer, EngineLostError, RemoteEngine, serve
from rl_train.processes.child import Child
from rl_train.weight_sync.transport import LOOPBACK


def processes(
    make: Callable[[], LocalEngine],
    devices: Sequence[str],
    *,
    silence: float = 60.0,
    timeout: float = 1800.0,
) -> list[EngineProcess]:
    """Return engines for `EnginePool`, each in a process of this machine; `EnginePool` starts the processes.

    Args:
        make: Makes the engine in its process; pickled, so a function of a module or a `partial` of it.
        devices: `CUDA_VISIBLE_DEVICES` of each engine; one process each.
        silence, timeout: See `RemoteEngine`.
    """
    return [
        EngineProcess(f"engine {number} (device {device or 'cpu'})", make, device, silence, timeout)
        for number, device in enumerate(devices)
    ]


class EngineProcess(RemoteEngine):
    """An engine in a process of this machine; see `processes`."""

    def __init__(self, name: str, make: Callable[[], LocalEngine], device: str, silence: float, timeout: float) -> None:
        super().__init__(name, silence, timeout)
        self._make, self._device = make, device
        self._lock = threading.Lock()
        self.child: Child | None = None

    def start(self) -> None:
        """See `RemoteEngine`."""
        super().start()
        path = [os.getcwd(), *filter(None, sys.path)]
        self.child = Child("rl_train.engines.process:main", path=path, env={"CUDA_VISIBLE_DEVICES": self._device})
        self.child.send(self._make)

    def end(self) -> None:
        """See `RemoteEngine`."""
        if self.child is not None:
            self.child.end()

    def call(self, method: str, *args: Any) -> Any:
        """See `RemoteEngine`; calls of several threads wait for each other."""
        with self._lock:
            return super().call(method, *args)

    def _ask(self, method: str, args: Sequence[Any]) -> None:
        assert self.child is not None
        self.child.send((method, args))

    def _listen(self, asked: None, method: str) -> list[Answer | None]:
        assert self.child is not None
        try:
            return [self.child.receive(LIFE_SECONDS)]
        except TimeoutError:
            return []
        except EOFError:
            raise EngineLostError(f"{self.name} ended during {method} {self.child.status()}") from None


def main(pipe: Connection[Any, Any]) -> None:
    """Hold an engine and answer calls until the other end is closed; the main function of the process."""
    one_at_a_time = threading.Lock()

    def send(message: Any) -> None:
        with one_at_a_time:
            pipe.send(message)

    def live() -> None:
        with suppress(OSError):
            while True:
                send(None)
                time.sleep(LIFE_SECONDS)

    threading.Thread(target=live, daemon=True).start()
    serve(pipe.recv(), pipe.recv, send, LOOPBACK)
