"""The process of agents, from inside: run the episodes of a function, or of a command, at the same time.

The process imports neither torch nor the models, so that it starts as fast as the user's module.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from rl_train.agents.container import Container
from rl_train.environments.worker import answer_all, called
from rl_train.processes.errors import cut
from rl_train.processes.worker import Calls, Pipe
from rl_train.rewards.worker import checked, load

# Characters of what a command has written to its standard error, in an error.
_MOST_SHOWN = 500


class Run(NamedTuple):
    """An episode: the endpoint and its key, the row, and the limit in seconds.

    `command` runs in place of the function, in the container if there is one.
    """

    base_url: str
    key: str
    row: Mapping[str, Any]
    limit: float
    command: str | None = None
    container: Container | None = None


class Ended(NamedTuple):
    """The end of an episode: the reward that a function returned, or None, and the failure."""

    reward: float | None = None
    error: str | None = None


def serve(pipe: Pipe) -> None:
    """Import a function, and answer each call "answer" with a `Run` by an `Ended`, several at the same time."""
    calls = Calls(pipe)
    if (host := load(calls, _Host)) is not None:
        asyncio.run(answer_all(calls, host))


class _Host:
    """Runs an agent: a function that takes a base URL and a row."""

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            inspect.signature(function).bind("url", {})
        except TypeError:
            raise TypeError(f"it takes {inspect.signature(function)}; an agent takes (base_url, row)") from None
        self._function, self._file = function, getattr(sys.modules.get(function.__module__), "__file__", None)

    async def answer(self, run: Run) -> Ended:
        """Run an episode to its end, or to its limit."""
        work = _command(run, run.command) if run.command is not None else self._called(run)
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=run.limit)
        if done:
            return task.result()
        task.cancel()
        if run.command is not None:
            with suppress(asyncio.CancelledError):
                await task
        return Ended(error=f"took longer than --agents.timeout, {run.limit:g} s")

    async def _called(self, run: Run) -> Ended:
        value, error = await called(self._file, self._function, run.base_url, run.row)
        if value is None:
            return Ended(error=error)
        outcome = checked(value)
        return Ended(outcome.reward, outcome.error)


async def _command(run: Run, command: str) -> Ended:
    """Run a command with the row as a JSON line on its standard input; at the end all its processes end."""
    arguments = shlex.split(command)
    if run.container is not None:
        arguments = run.container.command(arguments)
    environment = {"OPENAI_BASE_URL": run.base_url, "OPENAI_API_KEY": run.key}
    environment |= {"ANTHROPIC_BASE_URL": run.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": run.key}
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=PIPE,
            stdout=DEVNULL,
            stderr=PIPE,
            env=os.environ | environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return Ended(error=f"cannot be started: {error}")
    try:
        _, errors = await process.communicate(json.dumps(run.row, default=str).encode() + b"\n")
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode:
        text = errors.decode(errors="replace").strip()[-_MOST_SHOWN:]
        return Ended(error=f"ended with status {process.returncode}: {cut(text, _MOST_SHOWN)}")
    return Ended()


def command(base_url: str, row: Mapping[str, Any]) -> None:
    """Stand for the function in a process of commands."""
