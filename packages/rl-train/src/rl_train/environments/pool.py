"""`Environments`: the environments of a run in worker processes, seen from the run's process."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack, closing
from typing import Any

from rl_train.environments.worker import Request, Turn
from rl_train.options.options import TrainOptions
from rl_train.processes.errors import ProcessLost
from rl_train.processes.times import BLOCKED_SECONDS
from rl_train.rewards.pool import ModuleProcess

_SERVE = "rl_train.environments.worker:serve"


class Environments:
    """The environments of a run's samples, in `--rewards.workers` processes. Close them at the end.

    A process that ends is started again; the environments that it held are lost, and their turns carry that error.

    Raises:
        ValueError: The module cannot be imported, or the class is no `Environment`.
    """

    def __init__(self, options: TrainOptions, workers: int | None = None) -> None:
        assert options.environment is not None
        self._name, self._limit = options.environment, options.rewards.timeout
        module, _, name = self._name.partition(":")
        silence = self._limit + BLOCKED_SECONDS
        with ExitStack() as stack:
            self._processes = [
                stack.enter_context(closing(ModuleProcess(_SERVE, module, name, options.collective_timeout, silence)))
                for _ in range(workers or options.rewards.workers)
            ]
            try:
                for process in self._processes:
                    process.ready()
            except ValueError as error:
                raise ValueError(f"environment {self._name}: {error}") from None
            self._stack = stack.pop_all()

    def ask(self, sample: int, asks: Any, value: Any = None, **flags: bool) -> Future[Turn]:
        """Send a request about a sample; see `Request`. The numbers of samples are the caller's."""
        request = Request(sample, asks, self._limit, value, **flags)
        process = self._processes[sample % len(self._processes)]
        process.start()
        future: Future[Turn] = Future()
        process.submit("answer", request).add_done_callback(lambda call: future.set_result(_turn(call)))
        return future

    def schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools; ValueError for a tool without one."""
        turn = self.ask(0, "schemas").result()
        if turn.error is not None:
            raise ValueError(f"environment {self._name}: {turn.error}")
        return turn.messages

    def close(self) -> None:
        """End all processes."""
        self._stack.close()


def _turn(call: Future[Turn]) -> Turn:
    """Return the answer to a call; after a loss of its process the answer is an error."""
    error = call.exception()
    if error is None:
        return call.result()
    return Turn(error=error.reason if isinstance(error, ProcessLost) else str(error))
