"""`EngineProcess`: an engine in a process of this machine, on a device of its own; a pipe carries the messages."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rl_train.rollouts.interface import LocalEngine
from rl_train.rollouts.remote import LIFE_SECONDS, Answer, EngineLostError, RemoteEngine, serve
from rl_train.rollouts.transport import LOOPBACK


def processes(
    make: Callable[[], LocalEngine],
    devices: Sequence[str],
    *,
    silence: float = 60.0,
    timeout: float = 1800.0,
) -> list[EngineProcess]:
    """Return engines for `Apart`, each in a process of this machine; `Apart` starts the processes.

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
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """See `RemoteEngine`."""
        super().start()
        self._pipe, theirs = Pipe()
        env = os.environ | {"CUDA_VISIBLE_DEVICES": self._device, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        program = f"from rl_train.rollouts.process import main; main({theirs.fileno()})"
        self.process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()], env=env)
        # Close our copy of the end of the process, so that end-of-file reveals its death.
        theirs.close()
        self._send(self._make)

    def end(self) -> None:
        """See `RemoteEngine`."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._pipe.close()

    def call(self, method: str, *args: Any) -> Any:
        """See `RemoteEngine`; calls of several threads wait for each other."""
        with self._lock:
            return super().call(method, *args)

    def _ask(self, method: str, args: Sequence[Any]) -> None:
        # In a thread: a process that hangs may leave the pipe full.
        threading.Thread(target=self._send, args=(method, args), daemon=True).start()

    def _listen(self, asked: None, method: str) -> list[Answer | None]:
        try:
            return [self._pipe.recv()] if self._pipe.poll(LIFE_SECONDS) else []
        except (EOFError, OSError):
            assert self.process is not None
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            status = self.process.poll()
            raise EngineLostError(f"{self.name} ended during {method} (exit status {status})") from None

    def _send(self, *message: Any) -> None:
        with suppress(OSError, ValueError):  # the process has ended; who waits for the answer sees that
            self._pipe.send(message)


def main(pipe_end: int) -> None:
    """Hold an engine and answer calls until the other end is closed; the main function of the process."""
    pipe: Connection[Any, Any] = Connection(pipe_end)
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
    (make,) = pipe.recv()
    serve(make, pipe.recv, send, LOOPBACK)
