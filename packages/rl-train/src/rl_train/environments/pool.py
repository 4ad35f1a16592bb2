"""`Environments`: the environments of a run in worker processes, seen from the run's process."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from contextlib import ExitStack, closing
from typing import Any

from rl_train.environments.worker import Request, Turn
from rl_train.options.options import TrainOptions
from rl_train.rewards.pool import Process

# An event loop without a sign of life for this number of seconds beyond the limit of a call counts as blocked.
_GRACE_SECONDS = 10.0


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
        with ExitStack() as stack:
            self._processes = [
                stack.enter_context(closing(_Process(module, name, options.collective_timeout)))
                for _ in range(workers or options.rewards.workers)
            ]
            try:
                for process in self._processes:
                    process.begin(self._limit)
            except ValueError as error:
                raise ValueError(f"environment {self._name}: {error}") from None
            self._stack = stack.pop_all()

    def ask(self, sample: int, asks: Any, value: Any = None, **flags: bool) -> Future[Turn]:
        """Send a request about a sample; see `Request`. The numbers of samples are the caller's."""
        request = Request(sample, asks, self._limit, value, **flags)
        return self._processes[sample % len(self._processes)].ask(request)

    def schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools; ValueError for a tool without one."""
        turn = self.ask(0, "schemas").result()
        if turn.error is not None:
            raise ValueError(f"environment {self._name}: {turn.error}")
        return turn.messages

    def close(self) -> None:
        """End all processes."""
        self._stack.close()


class _Process(Process):
    """One process of environments (`rl_train.environments.worker.serve`), with a thread that takes its answers.

    A process without a sign of life for `limit` + 10 seconds is replaced as well.
    """

    home = "rl_train.environments.worker:serve"

    def begin(self, limit: float) -> None:
        """Wait until the module is imported, and listen to the process; ValueError as for `ready`."""
        self.ready()
        self._silence = limit + _GRACE_SECONDS
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._waiting: dict[int, Future[Turn]] = {}
        self._lost: str | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, request: Request) -> Future[Turn]:
        """Return a future of the answer."""
        future: Future[Turn] = Future()
        with self._lock:
            if self._lost is not None:
                future.set_result(Turn(error=self._lost))
                return future
            number = next(self._numbers)
            self._waiting[number] = future
            self._child.send((number, request))
        return future

    def _listen(self) -> None:
        while self._lost is None:
            try:
                message = self._child.receive(self._silence)
            except EOFError:
                self._replace(f"ended its process {self._child.status()}")
            except TimeoutError:
                self._replace(f"gave no sign of life for {self._silence:g} s: its process is stopped or blocked")
            else:
                if message is not None:
                    number, turn = message
                    self._waiting.pop(number).set_result(turn)

    def _replace(self, lost: str) -> None:
        """Start another process, and answer the waiting requests with the loss of their environments."""
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
            if self._closed:
                self._lost = "was closed"
            else:
                self._child.end()
                self._start()
                try:
                    self.ready()
                except ValueError as error:
                    self._lost = str(error)
        for future in waiting:
            future.set_result(Turn(error=lost))
