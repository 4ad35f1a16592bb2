"""`Agents`: the agents of a run in worker processes, seen from the run's process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing

from rl_train.agents.container import Container
from rl_train.agents.worker import Ended, Run
from rl_train.options.options import TrainOptions
from rl_train.processes.errors import ProcessLost
from rl_train.processes.times import BLOCKED_SECONDS
from rl_train.rewards.pool import ModuleProcess

_SERVE, _COMMAND = "rl_train.agents.worker:serve", "rl_train.agents.worker:command"


class Agents:
    """The agents of a run's episodes, in `--rewards.workers` processes. Close them at the end.

    At most `--agents.concurrent` episodes run at a time. A process that ends is started again; the episodes that it ran
    have failed. A function that does not return within its time is left behind in its thread; a command is killed,
    and its container removed.

    Raises:
        ValueError: The module cannot be imported, the function does not take a base URL and a row, or the program of
            containers is not installed.
    """

    def __init__(self, options: TrainOptions, workers: int | None = None) -> None:
        self._command, self._options = options.agent_command, options.agents
        Container.of(self._options)  # for its error
        module, _, name = (options.agent_function or _COMMAND).partition(":")
        self._numbers = itertools.count()
        with ExitStack() as stack:
            self._processes = [
                stack.enter_context(
                    closing(ModuleProcess(_SERVE, module, name, options.collective_timeout, BLOCKED_SECONDS))
                )
                for _ in range(workers or options.rewards.workers)
            ]
            try:
                for process in self._processes:
                    process.ready()
            except ValueError as error:
                raise ValueError(f"agent {options.agent_function}: {error}") from None
            self._threads = ThreadPoolExecutor(options.agents.concurrent, "agents")
            self._stack = stack.pop_all()

    def run(self, begin: Callable[[], Run]) -> Future[Ended]:
        """Return a future of the end of an episode, which `begin` gives when its turn has come."""
        return self._threads.submit(self._run, begin)

    def run_of(self, base_url: str, key: str, row: dict[str, object]) -> Run:
        """Return an episode with the limits of the options."""
        container = Container.of(self._options)
        return Run(base_url, key, row, self._options.timeout, self._command, container)

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._stack.close()

    def _run(self, begin: Callable[[], Run]) -> Ended:
        process = self._processes[next(self._numbers) % len(self._processes)]
        process.start()
        run = begin()
        try:
            ended: Ended = process.submit("answer", run).result()
        except ProcessLost as loss:
            ended = Ended(error=loss.reason)
        if ended.error is not None and run.container is not None:
            run.container.remove()
        return ended
