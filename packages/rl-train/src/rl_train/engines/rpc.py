"""`RemoteEngine`: an engine in another process, as its caller sees it; and `serve`, the loop of that process.

The caller sends `(method, args)` and waits for `(error, result)`; in between it hears signs of life. A weight sync is a
series of "load" calls, each with a `BucketMessage`, and the last with None; "abort" ends it earlier.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rl_train.engines.interface import LocalEngine
from rl_train.weight_sync.buckets import NamedTensors, unpack
from rl_train.weight_sync.transport import BucketMessage, Receiver, device_id

LIFE_SECONDS = 0.5
# The silence of a process that has just started: it imports torch.
_START_SECONDS = 120.0

Answer = tuple[Exception | None, Any]


class EngineLostError(RuntimeError):
    """The process of an engine has ended, or gave no sign of life in time."""


class RemoteEngine(ABC):
    """The caller's side of an engine in another process. A subclass starts the process and brings the messages there.

    Args:
        name: The name in messages.
        silence: The seconds without a sign of life after which the process hangs, and the time limit of a bucket.
        timeout: The seconds after which a call has taken too long, the start of the engine included.

    Attributes:
        current: Whether the engine has the newest weights; False for a new process.
    """

    def __init__(self, name: str, silence: float, timeout: float) -> None:
        self.name, self.current = name, False
        self.silence, self._timeout, self._starting = silence, timeout, True

    def start(self) -> None:
        """Start a process; the first call waits for its engine."""
        self.current, self._starting = False, True

    @abstractmethod
    def end(self) -> None:
        """Kill the process, also a stopped one. Safe to call twice."""

    @abstractmethod
    def _ask(self, method: str, args: Sequence[Any]) -> Any:
        """Send a call, without waiting, and return what `_listen` waits for."""

    @abstractmethod
    def _listen(self, asked: Any, method: str) -> list[Answer | None]:
        """Return what comes within LIFE_SECONDS: nothing, a sign of life (None), or the answer.

        Raises:
            EngineLostError: The process has ended.
        """

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine and return its result.

        Raises:
            EngineLostError: The process has ended, or gives no sign of life, or no answer in time.
            Exception: The error that the method raised.
        """
        asked = self._ask(method, args)
        begun = heard = time.monotonic()
        while True:
            for message in self._listen(asked, method):
                heard, self._starting = time.monotonic(), False
                if message is not None:
                    error, result = message
                    if error is not None:
                        raise error
                    return result
            now, silence = time.monotonic(), max(self.silence, _START_SECONDS * self._starting)
            if now - heard > silence:
                raise EngineLostError(f"{self.name} hangs: no sign of life for {silence:g} s during {method}")
            if now - begun > self._timeout:
                raise EngineLostError(f"{self.name} hangs: no answer to {method} for {self._timeout:g} s")


def serve(
    make: Callable[[], LocalEngine], receive: Callable[[], Any], send: Callable[[Answer], None], address: str
) -> None:
    """Make an engine, and answer the calls that `receive` returns until it raises EOFError or OSError.

    `address` is where the sender of weights and other engines reach this process.
    """
    engine: Any = None
    failure: Exception | None = None
    method, receiver = "", Receiver(address)
    try:
        engine = make()
    except Exception as caught:
        failure = _portable(caught)

    def arriving(args: list[BucketMessage | None]) -> NamedTensors:
        nonlocal method
        taken = 0
        while (message := args.pop()) is not None:
            number, missed = message.number, ""
            try:
                bucket = receiver.receive(message)
            except RuntimeError as error:
                # The sender sends the bucket again, to all engines that are alive.
                missed = str(error) or type(error).__name__
            else:
                del message
                if number > taken:
                    yield from unpack(bucket)
                taken = number
                del bucket
            send((None, missed))
            method, args = _call(receive)
            if method != "load":
                raise RuntimeError("the weight sync was aborted")

    with suppress(EOFError, OSError):
        while True:
            method, args = _call(receive)
            error, result = failure, None
            try:
                if engine is None:
                    pass
                elif method == "ready":
                    result = device_id()
                elif method == "generate":
                    result = engine.begin(*args)()
                elif method == "load":
                    engine.load(named_tensors := arriving(args))
                    for name, _ in named_tensors:
                        raise RuntimeError(f"the engine did not take {name}")
                elif method in ("sleep", "wake"):
                    getattr(engine, method)()
            except Exception as caught:
                error = None if method == "abort" else _portable(caught)
            receiver.close()
            send((error, result))


def _call(receive: Callable[[], Any]) -> tuple[str, list[Any]]:
    method, args = receive()
    return method, list(args)


def _portable(error: Exception) -> Exception:
    """Return a ValueError or a RuntimeError with the text and, for other kinds, the traceback of an error."""
    if isinstance(error, ValueError):
        return ValueError(str(error))
    return RuntimeError("".join(traceback.format_exception(error)).strip())
