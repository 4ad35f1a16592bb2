"""`Process`: a process that answers calls, as its caller sees it; its other side is `rl_train.processes.worker.Calls`.

Rewards, environments, engines and the ranks of this machine speak one protocol:

- A call is `(number, method, pickled arguments)`. The first call, "start", makes the object that the process holds.
- An answer is `(number, kind, pickled value)`: any number of parts, and then a result or an error (`portable`).
- None is a sign of life.
- A process is lost when it has ended, or when a call waits and is late or hears no sign of life. Then the process and
  its children are ended, its calls raise ProcessLost, and `start` starts another process.
"""

from __future__ import annotations

import itertools
import math
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from rl_train.processes.errors import ProcessLost, Raised, portable
from rl_train.processes.times import LIFE_SECONDS, PATIENCE_SECONDS


class Transport(Protocol):
    """The messages between a caller and a process, such as `Child`.

    Attributes:
        place: The place of the process, such as " (node 10.0.0.1)", for errors; empty on this machine.
    """

    place: str

    def send(self, message: Any) -> None:
        """Send a message without waiting; no effect after the process has ended."""

    def receive(self, limit: float) -> Any:
        """Return the next message; TimeoutError after `limit` seconds, EOFError after the process has ended."""

    def status(self) -> str:
        """Return the exit status of a process that has ended, for errors."""

    def end(self) -> None:
        """End the process, also a stopped one, and its children. Safe to call twice."""


class Call(Future[Any]):
    """The future of a call's result.

    Attributes:
        raised: The exception of the process, with its traceback; None without.
        number: The number of the call; -1 if the process was lost before.
    """

    def __init__(self, method: str, limit: float, on_part: Callable[[Any], Any] = lambda part: None) -> None:
        super().__init__()
        self.method, self.limit, self.on_part = method, limit, on_part
        self.raised: Raised | None = None
        self.number = -1
        self.renew()

    def renew(self) -> None:
        """Count the limit from now."""
        self.deadline = time.monotonic() + self.limit

    def lose(self, name: str, reason: str, late: bool = False) -> None:
        """Raise ProcessLost."""
        self.set_exception(ProcessLost(f"{name} {reason} during {self.method}", reason, late))


class Process:
    """The caller's side of a process. Nothing waits for a process that is stopped, hangs or has ended.

    Args:
        name: The name in errors.
        launch: Starts a process and returns the transport to it.
        start: The arguments of the call "start"; None: the process needs no start.
        start_limit: Seconds for the call "start".
        limit: Seconds for each other call, counted from the last answer of the process, parts included.
        silence: Seconds without a message after which a process with calls is lost. They count from the first message,
            and from the first of the calls.
        first_sign: Seconds until they count without a first message.
        dumps: Pickles arguments.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[], Transport],
        *,
        start: tuple[Any, ...] | None = None,
        start_limit: float = math.inf,
        limit: float = math.inf,
        silence: float = math.inf,
        first_sign: float = math.inf,
        dumps: Callable[[Any], bytes] = pickle.dumps,
    ) -> None:
        self.name, self.silence, self._first_sign = name, silence, first_sign
        self._launch, self._dumps = launch, dumps
        self._start, self._start_limit, self._limit = start, start_limit, limit
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._calls: dict[int, Call] = {}
        self._transport: Transport | None = None
        self._loss, self._closed, self._busy_since = "has not been started", False, 0.0

    def start(self) -> None:
        """Start the process, or another one after a loss; no effect while the process runs, and after `close`."""
        with self._lock:
            if self._transport is not None or self._closed:
                return
            self._transport = self._launch()
            if self._start is not None:
                self._started = self._begin(Call("start", self._start_limit), self._start)
        threading.Thread(target=self._listen, args=(self._transport,), daemon=True).start()

    def restart(self) -> None:
        """End the process if it runs, and start another one."""
        if (transport := self._transport) is not None:
            self._lose(transport, "was replaced")
        self.start()

    def ready(self) -> Any:
        """Wait until the process has started, and return the result of "start"."""
        return self._started.result()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method and return its result.

        Raises:
            ProcessLost: The process has ended, or was silent or late.
            Exception: The exception of the method; a note has its traceback, except for a ValueError.
        """
        return self.submit(method, *args).result()

    def submit(
        self,
        method: str,
        *args: Any,
        limit: float | None = None,
        on_part: Callable[[Any], Any] = lambda part: None,
    ) -> Call:
        """Call a method without waiting; see `call`.

        `limit` replaces that of all calls, see `Process`. `on_part` is called with each part of the answer, in another
        thread, before the call is done.
        """
        call = Call(method, self._limit if limit is None else limit, on_part)
        with self._lock:
            return self._begin(call, args)

    def close(self) -> None:
        """End the process for good; calls raise ProcessLost."""
        with self._lock:
            self._closed, transport = True, self._transport
        if transport is not None:
            self._lose(transport, "was closed")

    def _begin(self, call: Call, args: tuple[Any, ...]) -> Call:
        if self._transport is None:
            call.lose(self.name, self._loss)
            return call
        call.number = number = next(self._numbers)
        payload = self._dumps(args)
        if not self._calls:
            self._busy_since = time.monotonic()
        self._calls[number] = call
        self._transport.send((number, call.method, payload))
        return call

    def _listen(self, transport: Transport) -> None:
        heard = time.monotonic() + self._first_sign
        while self._transport is transport:
            with self._lock:
                next_due = min(self._calls.values(), key=lambda call: call.deadline, default=None)
            silent_at, now = max(heard, self._busy_since) + self.silence, time.monotonic()
            left = math.inf if next_due is None else min(silent_at, next_due.deadline) - now
            try:
                message = transport.receive(min(left, LIFE_SECONDS) if left > 0 else PATIENCE_SECONDS)
            except EOFError:
                self._lose(transport, f"ended its process {transport.status()}")
                return
            except TimeoutError:
                if next_due is None or left > 0:
                    continue
                late = silent_at > now
                silent = f"gave no sign of life for {self.silence:g} s: its process is stopped or blocked"
                self._lose(transport, f"took longer than {next_due.limit:g} s" if late else silent, late)
                return
            heard = time.monotonic()
            if message is not None and not self._take(transport, *message):
                self._lose(transport, f"did not start: {self._started.exception()}")
                return

    def _take(self, transport: Transport, number: int, kind: str, payload: bytes) -> bool:
        """Pass an answer on; return False if the process did not start."""
        try:
            value = pickle.loads(payload)
        except Exception as unreadable:
            kind, value = "error", portable(unreadable)
        with self._lock:
            call = self._calls.get(number) if kind == "part" else self._calls.pop(number, None)
            for waiting in self._calls.values():
                waiting.renew()
        if call is None:  # a part of its answer could not be unpickled
            return True
        if kind == "part":
            call.on_part(value)
        elif kind == "result":
            call.set_result(value)
        else:
            call.raised, error = value, value.exception()
            if value.mistake is None:
                error.add_note(f"in {self.name}{transport.place}:\n{value.text}")
            call.set_exception(error)
        return kind != "error" or call.method != "start"

    def _lose(self, transport: Transport, reason: str, late: bool = False) -> None:
        """End the process and fail its calls."""
        transport.end()
        with self._lock:
            if self._transport is not transport:
                return
            calls, self._calls = self._calls, {}
            self._transport, self._loss = None, (reason := "was closed" if self._closed else reason)
        for call in calls.values():
            call.lose(self.name + transport.place, reason, late)
