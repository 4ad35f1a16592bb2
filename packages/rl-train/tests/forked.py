"""`ForkedProgram`: a `Child`'s process, forked by the server of command ranks instead of started by a new Python.

It has imported torch, transformers and rl-train already, which takes seconds of each engine's start. Runs with `--slow`
start processes as users do.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

FUNCTIONS = {
    "rl_train.engines.process:main",
    "rl_train.rewards.worker:serve",
    "rl_train.environments.worker:serve",
    "rl_train.agents.worker:serve",
}
START = """
import os, signal, sys
os.setsid()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the server blocks it
os.dup2(stdin.fileno(), 0)
end = os.dup(pipe.fileno())
pipe.close()
os.environ.clear()
os.environ.update(env)
path = env["PYTHONPATH"].split(os.pathsep)
sys.path[:] = [*path, *(place for place in sys.path if place not in path)]
from rl_train.processes.child import main
main(end, function)
"""


class ForkedProgram:
    """A process forked by the server, with the methods of `subprocess.Popen` that `Child` calls."""

    def __init__(self, function: str, pipe: int, env: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        stdin, self.stdin = context.Pipe(duplex=False)
        names: dict[str, Any] = {"function": function, "env": dict(env), "stdin": stdin}
        with Connection(os.dup(pipe)) as end, stdin:
            self._process = context.Process(target=exec, args=(START, names | {"pipe": end}))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(command: Sequence[str], **options: Any) -> ForkedProgram | subprocess.Popen[bytes]:
    """Fork a program that runs a function of `FUNCTIONS`; start any other as `Child` does."""
    call = re.search(r"main\((\d+), '(.*)'\)", command[-1])
    if call is None or call[2] not in FUNCTIONS:
        return subprocess.Popen(command, **options)
    return ForkedProgram(call[2], int(call[1]), options["env"])
