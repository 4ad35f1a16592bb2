"""`RewardPool`: the processes of one reward, seen from the run; a process that hangs or ends is replaced."""

from __future__ import annotations

import math
import os
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from rl_train.processes.child import Child
from rl_train.processes.errors import ProcessLost
from rl_train.processes.host import Process
from rl_train.processes.times import LIFE_SECONDS
from rl_train.rewards.worker import Item, Outcome, late

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
        self._workers = [
            ModuleProcess("rl_train.rewards.worker:serve", module, function, start_limit) for _ in range(workers)
        ]
        self._threads = ThreadPoolExecutor(workers)
        self._idle = queue.SimpleQueue[ModuleProcess]()
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
        outcomes: dict[int, Outcome] = {}
        reason = ""
        try:
            worker.ready()
            call = worker.submit(
                "score",
                [items[place] for place in places],
                self._limit,
                limit=self._limit + (LIFE_SECONDS if self._form == "async" else 0),
                on_part=lambda part: outcomes.update({places[part[0]]: part[1]}),
            )
            call.result()
        except ProcessLost as loss:
            reason = late(self._limit) if loss.late else loss.reason
            worker.start()
        finally:
            self._idle.put(worker)
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


class ModuleProcess(Process):
    """A process that imports a module of the user.

    Args:
        function: The `module:function` that the process runs.
        module, name: The user's module, and the function or class in it.
        start_limit: Seconds for the import.
        silence: See `Process`.
    """

    def __init__(self, function: str, module: str, name: str, start_limit: float, silence: float = math.inf) -> None:
        # The process adds the working directory later: its files could hide modules of Python.
        path = [entry for entry in sys.path if entry not in ("", os.getcwd())]
        launch = partial(Child, function, path=path)
        super().__init__(module, launch, start=(module, name), start_limit=start_limit, silence=silence)
        self.start()

    def ready(self) -> Any:
        """Wait for the import, and return the result of "start"; ValueError if the module cannot be used."""
        try:
            return super().ready()
        except ProcessLost as loss:
            raise ValueError(f"importing {self.name} {loss.reason}") from None
