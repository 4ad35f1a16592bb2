"""`Future`: the result of a call that runs on the ranks of a group."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any, Generic, TypeVar

from rl_train.cluster.host import FailedCall, Seat
from rl_train.cluster.resources import import_ray
from rl_train.processes.errors import RankFailed, stopped
from rl_train.processes.times import DEATH_SECONDS, REPORT_SECONDS

T = TypeVar("T")


class RankDied(RankFailed):
    """The process of `rank`, or its node (an IP address), ended or was stopped while a call of `method` ran."""

    def __init__(self, message: str, rank: int, node: str, method: str) -> None:
        super().__init__(message, died=True)
        self.rank, self.node, self.method = rank, node, method


class Future(Generic[T]):
    """A call that `RayModelGroup.submit` has started; `result()` waits for its result.

    `failed` has the exceptions of ranks, `waiting` Ray's references to missing answers, `death` the first rank's death.
    """

    def __init__(
        self,
        label: str,
        method: str,
        references: list[Any],
        seats: Sequence[Seat],
        join: Callable[[list[Any]], T],
        settle: Callable[[Future[Any]], None],
    ) -> None:
        self.method = method
        self.failed: dict[int, FailedCall] = {}
        self.waiting = {reference: rank for rank, reference in enumerate(references)}
        self.death: RankDied | None = None
        self._label, self._seats, self._join, self._settle = label, seats, join, settle
        self._answers: dict[int, Any] = {}
        # References to looks for stopped processes, one for each node.
        self._looks: list[Any] = []
        self._deadline = float("inf")
        self._outcome: futures.Future[T] = futures.Future()

    def done(self) -> bool:
        """Say whether `result()` would return or raise without waiting for the ranks."""
        self._receive(0.0)
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for all ranks and return the joined result.

        `timeout` is in seconds. After a TimeoutError the call continues; call `result` again.

        Raises:
            Exception: The exception of the lowest failing rank; notes hold each failing rank, its node and traceback.
            RankDied: A rank's process or node ended; the group needs a `restart`.
            TimeoutError: Some ranks have not answered; the error names them.
        """
        self._receive(timeout)
        if not self._outcome.done():
            raise TimeoutError(
                f"{self._label} did not end within {timeout:g} s; ranks {sorted(self.waiting.values())} still run"
            )
        return self._outcome.result()

    def _receive(self, timeout: float | None) -> None:
        """Take the answers that arrive within `timeout` seconds."""
        ray = import_ray()
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._outcome.done():
            if not self.waiting:
                self._end()
                return
            left = min(until, self._deadline) - time.monotonic()
            references = [*self.waiting, *self._looks]
            ready, _ = ray.wait(references, timeout=None if left == float("inf") else max(0.0, left))
            for reference in ready:
                self._take(reference)
            if self.death is not None or (not ready and time.monotonic() >= self._deadline):
                self._end()
            elif not ready and time.monotonic() >= until:
                return

    def _take(self, reference: Any) -> None:
        """Take the answer of a rank, or the stopped ranks of a node."""
        ray = import_ray()
        if reference in self._looks:
            self._looks.remove(reference)
            with suppress(ray.exceptions.RayError):  # the node was lost
                for rank, reason in ray.get(reference).items():
                    self._die(rank, reason)
            return
        rank = self.waiting.pop(reference)
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayError as error:
            self._die(rank, f"died during {self._label}: {error}")
            return
        if not isinstance(answer, FailedCall):
            self._answers[rank] = answer
            return
        is_collective = isinstance(answer.raised.exception(), RuntimeError)
        grace = DEATH_SECONDS if is_collective else REPORT_SECONDS
        self._deadline = min(self._deadline, time.monotonic() + grace)
        if is_collective and not self.failed:
            self._looks = self._look()
        self.failed[rank] = answer

    def _end(self) -> None:
        failure = self.death or (self._as_exception() if self.failed else None)
        self._settle(self)
        try:
            if failure is not None:
                raise failure
            self._outcome.set_result(self._join([self._answers[rank] for rank in sorted(self._answers)]))
        except Exception as error:
            self._outcome.set_exception(error)
        # Release the ranks' results in Ray's object store.
        self._answers = {}

    def _look(self) -> list[Any]:
        """Look for stopped processes on the nodes of the missing ranks."""
        ray = import_ray()
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        look = ray.remote(num_cpus=0, max_retries=0)(stopped)
        pids: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for rank in sorted(self.waiting.values()):
            pids[self._seats[rank].node][rank] = self._seats[rank].pid
        return [
            look.options(scheduling_strategy=affinity(node, soft=False)).remote(pids_of_node)
            for node, pids_of_node in pids.items()
        ]

    def _die(self, rank: int, reason: str) -> None:
        self.death = self.death or RankDied(
            f"{self._where(rank)} {reason}", rank, self._seats[rank].address, self.method
        )

    def _where(self, rank: int) -> str:
        return f"rank {rank} (node {self._seats[rank].address})"

    def _as_exception(self) -> Exception:
        error = self.failed[min(self.failed)].raised.exception()
        for rank, failed in sorted(self.failed.items()):
            note = f"on {self._where(rank)}, in {failed.method}:\n{failed.raised.text}"
            if failed.method != self.method:
                note += f"{self._label} was not run after that."
            error.add_note(note)
        return error
