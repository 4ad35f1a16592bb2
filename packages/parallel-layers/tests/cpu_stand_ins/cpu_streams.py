"""Streams on a CPU that do what they are told in any order that is allowed: what is not waited for comes too late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WRITES = (torch.mm, torch.addmm, Tensor.copy_)


class CurrentStream:
    """The stream that a program is on: it does everything at once, after what it was told to wait for."""

    def record_event(self) -> Callable[[], None]:
        """An event, which is a function that returns when the event has come: this one always has."""
        return lambda: None

    def wait_event(self, event: Callable[[], None]) -> None:
        """Have done what was before the event."""
        event()

    def wait_stream(self, stream: CurrentStream) -> None:
        """Have done what that stream was told so far."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Have done everything so far."""
        self.record_event()()

    def __enter__(self) -> CurrentStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class OtherStream(CurrentStream):
    """A stream beside the current one: products and copies within it, and what `defer` is given, run in their order.

    By chance, that is at once, or as late as somebody waits for them.

    Args:
        chance: Of all streams together; equal on all ranks, whose barriers meet in one order then.
    """

    _entered: ClassVar[list[OtherStream]] = []
    _running: ClassVar[int] = 0

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._queue: list[Callable[[], object]] = []
        self._done = 0
        self._modes: list[_Deferred] = []

    @classmethod
    def defer(cls, call: Callable[[], object]) -> None:
        """Call it on the stream that is entered; on none, at once."""
        if not cls._entered:
            call()
            return
        stream = cls._entered[-1]
        stream._queue.append(call)
        if stream._chance.random() < 0.5:
            stream.record_event()()

    @property
    def pending(self) -> int:
        """Calls that nobody has waited for."""
        return len(self._queue) - self._done

    def record_event(self) -> Callable[[], None]:
        """An event after everything so far."""
        return partial(self._run, len(self._queue))

    def wait_event(self, event: Callable[[], None]) -> None:
        """What follows runs after the event."""
        self._queue.append(event)

    def __enter__(self) -> OtherStream:
        self._entered.append(self)
        self._modes.append(_Deferred())
        self._modes[-1].__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._modes.pop().__exit__(kind, error, traceback)
        self._entered.pop()

    def _run(self, end: int) -> None:
        while self._done < end:
            self._done += 1
            OtherStream._running += 1
            try:
                self._queue[self._done - 1]()
            finally:
                OtherStream._running -= 1


class _Deferred(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        if OtherStream._running or func not in _WRITES:
            return call()
        OtherStream.defer(call)
        return args[0] if func is Tensor.copy_ else (kwargs or {})["out"]
