"""`RewardPool`: the processes of one reward, seen from the run; a process that hangs or ends is replaced."""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from rl_train.processes.child import Child
from rl_train.rewards.worker import Item, Outcome, late

# An asynchronous reward ends its late responses itself; its process is killed this number of seconds later.
_GRACE_SECONDS = 0.5
# Maximum number of responses of one call.
_MOST_OF_A_CALL = 16


class RewardPool:
    """Call a reward in separate processes.

    Args:
        module, function: The reward; each process imports the module.
        workers: Number of processes.
        limit: Seconds for each call of the reward.
        start_limit: Seconds for the import of the module.
        stops: Leave responses without an outcome after a process was lost, since the run ends.

    Raises:
        ValueError: The module or the function cannot be used.
    """

    def __init__(
        self, module: str, function: str, *, workers: int, limit: float, start_limit: float, stops: bool
    ) -> None:
        self._limit, self._stops = limit, stops
        self._workers = [Process(module, function, start_limit) for _ in range(workers)]
        self._threads = ThreadPoolExecutor(workers)
        self._idle = queue.SimpleQueue[Process]()
        try:
            for worker in self._workers:
                self._form = worker.ready()
                self._idle.put(worker)
        except ValueError:
            self.close()
            raise

    def begin(self, items: Sequence[Item]) -> list[Future[dict[int, Outcome]]]:
        """Start on the items; the futures together have an outcome for each place in `items`."""
        places, num_workers = range(len(items)), len(self._workers)
        # Several shares for each process: some responses take longer than others.
        size = min(_MOST_OF_A_CALL, max(1, len(items) // (8 * num_workers)))
        shares: dict[str, list[Sequence[int]]] = {
            "one": [places[first : first + size] for first in range(0, len(items), size)],
            "batch": [places],
            "async": [places[first::num_workers] for first in range(num_workers)],
        }
        return [self._threads.submit(self._call, share, items) for share in shares[self._form] if share]

    def close(self) -> None:
        """End the processes; open requests stay unanswered."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _call(self, places: Sequence[int], items: Sequence[Item]) -> dict[int, Outcome]:
        worker = self._idle.get()
        try:
            limit = self._limit + (_GRACE_SECONDS if self._form == "async" else 0)
            answers, reason = worker.call(self._limit, [items[place] for place in places], limit)
        finally:
            self._idle.put(worker)
        outcomes = {places[answered]: outcome for answered, outcome in answers.items()}
        missing = [place for place in places if place not in outcomes]
        retries: list[Sequence[int]] = []
        if missing and self._form == "async" and len(places) > 1:
            # One response has blocked or ended the process; called alone, each of the others gets its outcome.
            retries = [[place] for place in missing]
        else:
            # Responses are scored in order: the cause is the first response without an outcome, or the whole batch.
            causes = 1 if self._form == "one" else len(missing)
            outcomes |= {place: Outcome(0.0, reason) for place in missing[:causes]}
            retries = [] if self._stops or not missing[causes:] else [missing[causes:]]
        for retried_places in retries:
            outcomes |= self._call(retried_places, items)
        return outcomes


class Process:
    """One process of a reward.

    Attributes:
        home: The `module:function` that is the process.
    """

    home = "rl_train.rewards.worker:serve"

    def __init__(self, module: str, function: str, start_limit: float) -> None:
        self._module, self._function, self._start_limit = module, function, start_limit
        self._closed, self._calls = False, 0
        self._start()

    def _start(self) -> None:
        # The process adds the working directory later: its files could hide modules of Python.
        path = [entry for entry in sys.path if entry not in ("", os.getcwd())]
        self._child = Child(self.home, self._module, self._function, path=path)
        self._form: str | None = None

    def ready(self) -> str:
        """Wait until the module is imported, and return the form of the reward."""
        if self._form is None:
            try:
                self._form, error = self._child.receive(self._start_limit)
            except TimeoutError:
                error = f"importing {self._module} took longer than {self._start_limit:g} s"
            except EOFError:
                error = f"importing {self._module} ended its process {self._child.status()}"
            if error is not None:
                raise ValueError(error)
        assert self._form is not None
        return self._form

    def call(self, limit: float, items: Sequence[Item], wait: float) -> tuple[dict[int, Outcome], str]:
        """Return the outcomes by place, and the reason why other outcomes are missing.

        The process is replaced if it ends, or sends no outcome for `wait` seconds.
        """
        self.ready()
        self._calls += 1
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + wait
        reason = late(limit)
        try:
            self._child.send((self._calls, limit, list(items)))
            while len(outcomes) < len(items):
                call, place, outcome = self._child.receive(deadline - time.monotonic())
                if call == self._calls:
                    outcomes[place] = outcome
                    deadline = time.monotonic() + wait
        except TimeoutError:
            pass
        except EOFError:
            reason = f"ended its process {self._child.status()}"
        if len(outcomes) < len(items) and not self._closed:
            self._child.end()
            self._start()
        return outcomes, reason

    def close(self) -> None:
        """End the process for good."""
        self._closed = True
        self._child.end()
