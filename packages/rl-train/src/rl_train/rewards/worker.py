"""The process of a reward, from inside: import the function, call it for each request, and answer.

The process imports neither torch nor the models, so that it starts as fast as the user's module.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from rl_train.processes.child import forks_leave
from rl_train.processes.errors import encodable, shown
from rl_train.processes.worker import Calls, Pipe

T = TypeVar("T")

# Maximum number of characters of an answer.
_MOST_ANSWER = 10_000
# The largest finite number of fp32.
_LARGEST = (2 - 2**-23) * 2.0**127


class Outcome(NamedTuple):
    """The reward of a response, and the answer in it; after a failure `error` describes it, and the reward is 0."""

    reward: float
    error: str | None = None
    answer: str | None = None


# (prompt, response, row)
Item = tuple[Any, Any, Any]
Send = Callable[[tuple[int, Outcome]], None]


# Parameters of the rewards of other systems, which would receive other values here.
_FOREIGN = {
    "verl": r"(data_source|solution_str|ground_truth|extra_info)s?",
    "TRL": "completions",
    "OpenRLHF": "queries",
}


def form_of(function: Any) -> str:
    """Return the form of a reward: "one" response a call, a "batch" a call, or "async", many calls at the same time.

    A batch has a first parameter with the name `prompts`.

    Raises:
        TypeError: The function does not take three arguments, or is written for another system.
    """
    with suppress(ValueError):  # some functions written in C have no signature
        signature = inspect.signature(function)
        for system, pattern in _FOREIGN.items():
            if names := [name for name in list(signature.parameters)[:3] if re.fullmatch(pattern, name)]:
                raise TypeError(
                    f"it takes {signature}, and {', '.join(names)} belong to {system}'s rewards; write "
                    f"def reward(prompt, response, row), which calls {getattr(function, '__name__', 'it')} with what "
                    "it takes, such as response and row['answer']"
                )
        try:
            signature.bind(None, None, None)
        except TypeError:
            raise TypeError(
                f"it takes {signature}; a reward takes (prompt, response, row), or (prompts, responses, rows) and "
                "returns a list"
            ) from None
        if next(iter(signature.parameters)) == "prompts":
            return "batch"
    called = (function, getattr(type(function), "__call__", None))  # noqa: B004  # the method, not whether it exists
    return "async" if any(map(inspect.iscoroutinefunction, called)) else "one"


def late(limit: float) -> str:
    """Return the error of a reward that took longer than `limit` seconds."""
    return f"took longer than --rewards.timeout, {limit:g} s"


def serve(pipe: Pipe) -> None:
    """Import a reward, and answer each call "score" by a part for each item: its place and its `Outcome`."""
    calls = Calls(pipe)
    if (caller := load(calls, _Caller)) is not None:
        for call in calls:
            call.run(partial(caller, call.part))


def import_function(module: str, name: str) -> Callable[..., Any]:
    """Import a function of the user; raise ValueError if the module or the function cannot be used."""
    try:
        with forks_leave():
            function = getattr(importlib.import_module(module), name, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"importing {module} raised {type(error).__name__}: {shown(error, str)}") from error
    if not callable(function):
        raise ValueError(f"{module} has no function {name}")
    return function


def load(calls: Calls, make: Callable[[Any], T]) -> T | None:
    """Import the module of the call "start", and return `make(...)` of the function or class; None after an error.

    `make` raises TypeError for an unsuitable object. The answer is the `form` of the made object, if it has one.
    """
    sys.path.insert(0, os.getcwd())
    call = next(calls)
    try:
        made = make(import_function(*call.arguments()))
    except (TypeError, ValueError) as error:
        call.fail(ValueError(str(error)))
        return None
    call.answer(getattr(made, "form", None))
    return made


class _Caller:
    """Call a reward in its form, and send the outcome of each item."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.form = function, form_of(function)
        self._file = getattr(sys.modules.get(function.__module__), "__file__", None)
        # One event loop for all calls: a reward may keep a connection open from one call to the next.
        self._runner = asyncio.Runner()

    def __call__(self, send: Send, items: Sequence[Item], limit: float) -> None:
        if self.form == "async":
            self._runner.run(self._concurrently(items, limit, send))
        elif self.form == "batch":
            for place, outcome in enumerate(self._batch(items)):
                send((place, outcome))
        else:
            for place, item in enumerate(items):
                send((place, self._one(item)))

    def _one(self, item: Item) -> Outcome:
        try:
            with forks_leave():
                return checked(self._function(*item))
        except BaseException as error:
            return self._raised(error)

    def _batch(self, items: Sequence[Item]) -> list[Outcome]:
        try:
            with forks_leave():
                returned = self._function(*map(list, zip(*items, strict=True)))
                if inspect.isawaitable(returned):
                    returned = self._runner.run(_value(returned))
                values = list(returned) if isinstance(returned, Iterable) else None
        except BaseException as error:
            return [self._raised(error)] * len(items)
        if values is None:
            return [Outcome(0.0, f"returned {shown(returned)} for {len(items)} responses; return a list")] * len(items)
        if len(values) != len(items):
            return [Outcome(0.0, f"returned {len(values)} numbers for {len(items)} responses")] * len(items)
        return [checked(value) for value in values]

    async def _concurrently(self, items: Sequence[Item], limit: float, send: Send) -> None:
        async def score_one(place: int, item: Item) -> None:
            bound = asyncio.timeout(limit)
            try:
                async with bound:
                    with forks_leave():
                        outcome = checked(await self._function(*item))
            except BaseException as error:
                outcome = Outcome(0.0, late(limit)) if bound.expired() else self._raised(error)
            send((place, outcome))

        await asyncio.gather(*(score_one(place, item) for place, item in enumerate(items)))

    def _raised(self, error: BaseException) -> Outcome:
        return Outcome(0.0, raised(error, self._file))


def raised(error: BaseException, file: str | None) -> str:
    """Describe an exception, with its line in the user's file even if a library raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if frame.filename == file] or frames[-1:]
    where = f" ({os.path.basename(user_frames[-1].filename)}, line {user_frames[-1].lineno})" if user_frames else ""
    return f"raised {type(error).__name__}: {shown(error, str)}{where}"


async def _value(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def checked(value: Any) -> Outcome:
    """Return the outcome of a reward's result: a number that is finite in fp32, or (number, answer)."""
    answer = None
    if isinstance(value, tuple) and len(value) == 2:
        value, answer = value
    try:
        number = float(value)
    except OverflowError:  # a large integer
        number = math.inf
    except BaseException:
        return Outcome(0.0, f"returned {shown(value)}, which is not a number")
    if not math.isfinite(number) or abs(number) > _LARGEST:
        return Outcome(0.0, f"returned {number}; it must be finite in fp32")
    if answer is None:
        return Outcome(number)
    try:
        text = str(answer)
    except BaseException as error:
        return Outcome(0.0, f"returned an answer whose str raises {type(error).__name__}")
    if len(text) > _MOST_ANSWER:
        # The digest keeps different answers different.
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        text = f"{text[:_MOST_ANSWER]}... ({len(text)} characters, SHA-256 {digest})"
    return Outcome(number, answer=encodable(text))
