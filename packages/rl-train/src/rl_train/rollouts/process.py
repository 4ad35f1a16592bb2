"""`EngineProcess`: the process of one engine, which answers calls and gives signs of life."""

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
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch.multiprocessing  # noqa: F401  # teaches pickle to share tensors
from torch import Tensor

from rl_train.rollouts.handover import Pairs, checksum
from rl_train.rollouts.local import LocalEngine

_LIFE_SECONDS = 0.5
# The silence of a process that has just started: it imports torch.
_START_SECONDS = 120.0


class EngineLostError(RuntimeError):
    """The process of an engine has ended, or gave no sign of life in time."""


class HostMemory:
    """The transport of one bucket: shared memory of this host. Another transport has these two methods."""

    def pack(self, bucket: list[tuple[str, Tensor]]) -> Any:
        """Return a message with the tensors, in the process that sends."""
        return [(name, tensor.detach().to("cpu", copy=True).contiguous().share_memory_()) for name, tensor in bucket]

    def unpack(self, message: Any) -> list[tuple[str, Tensor]]:
        """Return the tensors of a message, in the process that receives; they must stay as they are."""
        pairs: list[tuple[str, Tensor]] = message
        return pairs


class EngineProcess:
    """The process of one engine, as seen from outside.

    Args:
        name: The name in messages.
        make, device, transport, silence, timeout: See `Apart`.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], LocalEngine],
        device: str,
        transport: HostMemory,
        silence: float,
        timeout: float,
    ) -> None:
        self.name, self._arguments, self._device = name, (make, transport), device
        self._silence, self._timeout = silence, timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process anew; the first call waits for its engine."""
        self.end()
        self._calls, calls = Pipe()
        self._life, life = Pipe()
        self._started = False
        env = os.environ | {"CUDA_VISIBLE_DEVICES": self._device, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ends = calls.fileno(), life.fileno()
        program = f"from rl_train.rollouts.process import serve; serve{ends}"
        self._process = subprocess.Popen([sys.executable, "-c", program], pass_fds=ends, env=env)
        # Close our copies of the ends of the process, so that end-of-file reveals its death.
        calls.close()
        life.close()
        # The key opens shared tensors.
        _send(self._calls, (bytes(multiprocessing.current_process().authkey), self._arguments))

    def end(self) -> None:
        """Kill the process, also a stopped one. Safe to call twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._calls.close()
            self._life.close()
            self._process = None

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the process and return its result.

        Raises:
            EngineLostError: The process has ended, or gives no sign of life, or no answer in time.
            Exception: The error that the method raised.
        """
        with self._lock:
            # In a thread: a process that hangs may leave the pipe full.
            threading.Thread(target=_send, args=(self._calls, (method, args)), daemon=True).start()
            error, answer = self._answer(method)
        if error is not None:
            raise error
        return answer

    def _answer(self, method: str) -> tuple[Exception | None, Any]:
        process = self._process
        assert process is not None
        begun = heard = time.monotonic()
        while True:
            try:
                found = wait([self._calls, self._life], _LIFE_SECONDS)
                if self._life in found:
                    self._life.recv_bytes()
                    self._started, heard = True, time.monotonic()
                if self._calls in found:
                    return self._calls.recv()
            except (EOFError, ConnectionError):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                why = f"ended during {method} (exit status {process.poll()})"
                raise EngineLostError(f"{self.name} {why}") from None
            now = time.monotonic()
            silence = self._silence if self._started else max(self._silence, _START_SECONDS)
            if now - heard > silence:
                raise EngineLostError(f"{self.name} hangs: no sign of life for {silence:g} s during {method}")
            if now - begun > self._timeout:
                raise EngineLostError(f"{self.name} hangs: no answer to {method} for {self._timeout:g} s")


def _send(connection: Connection[Any, Any], message: Any) -> None:
    with suppress(OSError, ValueError):  # the process has ended; who waits for the answer sees that
        connection.send(message)


class _BrokenOffError(Exception):
    """The sender has ended the hand-over before the last tensor."""


def serve(calls_end: int, life_end: int) -> None:
    """Hold an engine and answer calls until the other end is closed; the main function of the process."""
    calls: Connection[Any, Any] = Connection(calls_end)
    life: Connection[Any, Any] = Connection(life_end)
    threading.Thread(target=_live, args=(life,), daemon=True).start()
    multiprocessing.current_process().authkey, (make, transport) = calls.recv()
    engine: LocalEngine | None = None
    failure: Exception | None = None
    try:
        engine = make()
    except Exception as error:
        failure = error
    while True:
        try:
            method, args = calls.recv()
        except (EOFError, OSError):
            return
        result: Any = None
        error_of_call = failure
        if engine is not None:
            try:
                if method == "generate":
                    result = engine.begin(*args)()
                elif method == "load":
                    calls.send((None, None))
                    engine.load(_arriving(calls, transport))
                elif method == "bucket":
                    raise RuntimeError("a bucket came outside of a hand-over")
                elif method in ("sleep", "wake"):
                    getattr(engine, method)()
            except _BrokenOffError:
                pass  # the sender knows
            except Exception as error:
                error_of_call = error
        calls.send((None if error_of_call is None else _portable(error_of_call), result))


def _arriving(calls: Connection[Any, Any], transport: HostMemory) -> Pairs:
    """Yield the tensors of a hand-over; the answer to its last message is sent by the caller."""
    while True:
        method, args = calls.recv()
        if method == "end":
            if not args[0]:
                raise _BrokenOffError
            return
        message, sums = args
        pairs = transport.unpack(message)
        for (name, tensor), sum_sent in zip(pairs, sums or [None] * len(pairs), strict=True):
            if sum_sent is not None and checksum(tensor) != sum_sent:
                raise ValueError(f"{name} arrived with other bits than were sent: its checksum differs")
        yield from pairs
        del pairs, message, args
        calls.send((None, None))


def _live(life: Connection[Any, Any]) -> None:
    """Give signs of life until the other end is closed."""
    while True:
        try:
            life.send_bytes(b".")
        except OSError:
            return
        time.sleep(_LIFE_SECONDS)


def _portable(error: Exception) -> Exception:
    """Return a ValueError or a RuntimeError with the text and, for other kinds, the traceback of an error."""
    if isinstance(error, ValueError):
        return ValueError(str(error))
    return RuntimeError("".join(traceback.format_exception(error)).strip())
