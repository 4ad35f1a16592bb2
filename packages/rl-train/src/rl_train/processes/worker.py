"""`Calls`: the calls that arrive at a process; see `rl_train.processes.host` for the protocol.

This file imports no torch, so that a process starts as fast as its work.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from rl_train.processes.errors import portable
from rl_train.processes.times import LIFE_SECONDS


class Pipe(Protocol):
    """The end of a pipe in the process that answers."""

    def recv(self) -> Any:
        """Return the next message; EOFError or OSError when the caller is gone."""

    def poll(self) -> bool:
        """Say whether `recv` would return, or raise, at once."""

    def send(self, message: Any) -> None:
        """Send a message; OSError when the caller is gone."""


class Calls:
    """Iterate over the calls of a process; the iterator ends when the caller is gone."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def __iter__(self) -> Calls:
        return self

    def __next__(self) -> ReceivedCall:
        try:
            return ReceivedCall(self._send, *self._pipe.recv())
        except (EOFError, OSError):
            raise StopIteration from None

    @property
    def waiting(self) -> bool:
        """Say whether a call waits, or the caller is gone."""
        try:
            return self._pipe.poll()
        except (EOFError, OSError):
            return True

    def send_signs(self, through: Callable[[Callable[[], None]], Any] = lambda send: send()) -> None:
        """Send signs of life from a thread.

        Args:
            through: Calls the function that sends a sign, such as `call_soon_threadsafe` of an event loop: then signs
                also show that the event loop is alive.
        """

        def live() -> None:
            with suppress(RuntimeError):  # the event loop has been closed
                while True:
                    through(partial(self._send, None))
                    time.sleep(LIFE_SECONDS)

        threading.Thread(target=live, daemon=True).start()

    def _send(self, message: Any) -> None:
        with self._lock, suppress(OSError):
            self._pipe.send(message)


class ReceivedCall:
    """A call that waits for its answer: any number of parts, and then a result or an error.

    Attributes:
        method: The name of the method.
        number: The number of the call, as `Call.number`.
    """

    def __init__(self, send: Callable[[Any], None], number: int, method: str, payload: bytes) -> None:
        self.method = method
        self._send, self.number, self._payload = send, number, payload

    def arguments(self) -> tuple[Any, ...]:
        """Unpickle the arguments."""
        arguments: tuple[Any, ...] = pickle.loads(self._payload)
        return arguments

    def part(self, value: Any) -> None:
        """Send a part of the answer."""
        self._answer("part", value)

    def run(self, function: Callable[..., Any]) -> None:
        """Answer by the result of `function` with the arguments, or by the exception."""
        try:
            self.answer(function(*self.arguments()))
        except BaseException as error:
            self.fail(error)

    def answer(self, result: Any = None) -> None:
        """Answer by a result."""
        self._answer("result", result)

    def fail(self, error: BaseException) -> None:
        """Answer by an exception."""
        self._answer("error", portable(error))

    def _answer(self, kind: str, value: Any) -> None:
        # Pickled apart from the message: an error of pickling concerns this call alone.
        self._send((self.number, kind, pickle.dumps(value)))
