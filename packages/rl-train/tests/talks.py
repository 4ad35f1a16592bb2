"""Environments of the tests, as a user would write them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rl_train.environments import Environment, Step
from rl_train.rewards import Response


class Talk(Environment):
    """Says "ab" after each of the first `turns` - 1 responses, and gives 1 for each response."""

    def reset(self, row: Mapping[str, Any]) -> Any:
        self.row, self.turn = row, 0
        if row.get("reset") == "raise":
            raise RuntimeError("no room")
        return row.get("begin")

    def step(self, response: Response) -> Any:
        self.turn += 1
        match self.row.get("step"):
            case "raise":
                raise KeyError("gone")
            case "hang":
                time.sleep(60)
            case "number":
                return 5
            case "nan":
                return Step(reward=float("nan"))
            case "robot":
                return Step([{"content": "no role"}])
            case "end":
                os._exit(3)
            case "panic":
                raise Panic("index out of bounds")
            case "cancelled":
                raise asyncio.CancelledError
            case "fork":
                if os.fork() == 0:
                    return Step(reward=7.0)
                os.wait()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "surrogate":
                return Step("a\ud83d")
            case "refused":
                return Step([{"role": "refused", "content": "x"}], reward=1.0)
            case "huge":
                return Step("a" * 2**24)
            case "late failure" if self.turn == 2:
                raise KeyError("gone")
        return Step("ab" if self.turn < self.row.get("turns", 2) else (), reward=1.0)

    def close(self) -> None:
        if self.row.get("close") == "raise":
            raise OSError("still open")


class Panic(BaseException):
    """A panic, as a library written in Rust raises it."""


class Stubborn(Environment):
    """Does not end when it is cancelled."""

    async def step(self, response: Response) -> Step:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)


class Blocks(Environment):
    """Keeps the event loop of its process from running for longer than the watchdog allows without a limit."""

    async def reset(self, row: Mapping[str, Any]) -> None:
        time.sleep(12)


class Counter(Environment):
    """Has tools with a state of their own, of all kinds."""

    def __init__(self) -> None:
        self.tools = (self.count, self.wait, self.fail, self.look, self.panic, self.half)
        self.number = 0

    async def count(self, by: int) -> int:
        """Count on.

        Args:
            by: The step.
        """
        await asyncio.sleep(0)
        self.number += by
        return self.number

    def wait(self) -> None:
        """Wait."""
        time.sleep(60)

    def fail(self) -> None:
        """Fail."""
        raise OSError("broken")

    def look(self) -> dict[str, int]:
        """Look."""
        return {"number": self.number}

    def panic(self) -> None:
        """Panic."""
        raise Panic("index out of bounds")

    def half(self) -> str:
        """Return half of a surrogate pair, as a file that is no UTF-8 gives, and much text."""
        return "\udc80" + "a" * 2**21

    async def step(self, response: Response) -> Step:
        return Step(reward=self.number)


class NoSchema(Environment):
    tools = (lambda x: x,)


class NoEnvironment:
    pass
