"""`EngineProcess`: the process of one engine, which answers calls and gives signs of life.

Both use one pipe. The caller sends `(method, args)` and waits for `(error, result)`; in between comes None, a sign of
life. A hand-over is a row of calls of "load", each with a bucket of tensors, and the last with None.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch.multiprocessing  # noqa: F401  # teaches pickle to share tensors

from rl_train.rollouts.handover import Pairs, unpack
from rl_train.rollouts.interface import LocalEngine

_LIFE_SECONDS = 0.5
# The silence of a process that has just started: it imports torch.
_START_SECONDS = 120.0


class EngineLostError(RuntimeError):
    """The process of an engine has ended, or gave no sign of life in time."""


class EngineProcess:
    """The process of one engine, as seen from outside.

    Args:
        name: The name in messages.
        make, device, silence, timeout: See `Apart`.

    Attributes:
        current: Whether the engine has the newest weights; a new process has not.
    """

    def __init__(self, name: str, make: Callable[[], LocalEngine], device: str, silence: float, timeout: float) -> None:
        self.name, self._make, self._device, self._silence, self._timeout = name, make, device, silence, timeout
        self._lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """Start a process; the first call waits for its engine."""
        self.current = False
        self._pipe, theirs = Pipe()
        env = os.environ | {"CUDA_VISIBLE_DEVICES": self._device, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        program = f"from rl_train.rollouts.process import serve; serve({theirs.fileno()})"
        self.process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()], env=env)
        self._heard = time.monotonic() + max(0.0, _START_SECONDS - self._silence)
        # Close our copy of the end of the process, so that end-of-file reveals its death.
        theirs.close()
        # The key opens shared tensors.
        self._send(bytes(multiprocessing.current_process().authkey), self._make)

    def end(self) -> None:
        """Kill the process, also a stopped one. Safe to call twice."""
        self.process.kill()
        self.process.wait()
        self._pipe.close()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the process and return its result.

        Raises:
            EngineLostError: The process has ended, or gives no sign of life, or no answer in time.
            Exception: The error that the method raised.
        """
        with self._lock:
            # In a thread: a process that hangs may leave the pipe full.
            threading.Thread(target=self._send, args=(method, args), daemon=True).start()
            error, result = self._answer(method)
        if error is not None:
            raise error
        return result

    def _answer(self, method: str) -> tuple[Exception | None, Any]:
        begun = time.monotonic()
        self._heard = max(self._heard, begun)
        while True:
            try:
                if self._pipe.poll(_LIFE_SECONDS):
                    answer: tuple[Exception | None, Any] | None = self._pipe.recv()
                    self._heard = time.monotonic()
                    if answer is not None:
                        return answer
            except (EOFError, OSError):
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)
                status = self.process.poll()
                raise EngineLostError(f"{self.name} ended during {method} (exit status {status})") from None
            now = time.monotonic()
            if now - self._heard > self._silence:
                raise EngineLostError(f"{self.name} hangs: no sign of life for {self._silence:g} s during {method}")
            if now - begun > self._timeout:
                raise EngineLostError(f"{self.name} hangs: no answer to {method} for {self._timeout:g} s")

    def _send(self, *message: Any) -> None:
        with suppress(OSError, ValueError):  # the process has ended; who waits for the answer sees that
            self._pipe.send(message)


def serve(pipe_end: int) -> None:
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
                time.sleep(_LIFE_SECONDS)

    threading.Thread(target=live, daemon=True).start()
    multiprocessing.current_process().authkey, make = pipe.recv()
    engine: Any = None
    failure: Exception | None = None
    try:
        engine = make()
    except Exception as caught:
        failure = _portable(caught)

    def arriving(bucket: Any) -> Pairs:
        while bucket is not None:
            yield from unpack(bucket)
            del bucket
            send((None, None))
            method, (bucket,) = pipe.recv()
            if method != "load":
                raise RuntimeError("the hand-over broke off")

    with suppress(EOFError, OSError):
        while True:
            method, args = pipe.recv()
            error, result = failure, None
            try:
                if engine is None:
                    pass
                elif method == "generate":
                    result = engine.begin(*args)()
                elif method == "load":
                    engine.load(pairs := arriving(*args))
                    for name, _ in pairs:
                        raise RuntimeError(f"the engine did not take {name}")
                elif method in ("sleep", "wake"):
                    getattr(engine, method)()
            except Exception as caught:
                error = _portable(caught)
            send((error, result))


def _portable(error: Exception) -> Exception:
    """Return a ValueError or a RuntimeError with the text and, for other kinds, the traceback of an error."""
    if isinstance(error, ValueError):
        return ValueError(str(error))
    return RuntimeError("".join(traceback.format_exception(error)).strip())
