"""`Future`: the result of a call that runs on the ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rl_train.cluster.host import Raised
from rl_train.cluster.launch import RankFailed
from rl_train.cluster.resources import import_ray

# Seconds to wait for the other ranks after one rank has failed: they may wait in a collective that never ends.
_GRACE_SECONDS = 5.0
# The same after a RuntimeError: a collective raises it when a peer died, and Ray may notice a lost node later.
_DEATH_SECONDS = 40.0

T = TypeVar("T")


class RankDied(RankFailed):
    """The process of `rank`, or its node (an IP address), ended while a call of `method` ran."""

    def __init__(self, message: str, rank: int, node: str, method: str) -> None:
        super().__init__(message, died=True)
        self.rank, self.node, self.method = rank, node, method


class Future(Generic[T]):
    """A call that `RayModelGroup.submit` has started; `result()` waits for its result.

    `raised` has the exceptions of ranks, `waiting` Ray's references to missing answers, `death` the first rank's death.
    """

    def __init__(
        self,
        label: str,
        method: str,
        references: list[Any],
        nodes: list[str],
        join: Callable[[list[Any]], T],
        settle: Callable[[Future[Any]], None],
    ) -> None:
        self.method = method
        self.raised: dict[int, Raised] = {}
        self.waiting = {reference: rank for rank, reference in enumerate(references)}
        self.death: RankDied | None = None
        self._label, self._nodes, self._join, self._settle = label, nodes, join, settle
        self._answers: dict[int, Any] = {}
        self._deadline = float("inf")
        self._result: T | None = None
        self._error: Exception | None = None
        self._over = False

    def done(self) -> bool:
        """Say whether `result()` would return or raise without waiting for the ranks."""
        self._receive(0.0)
        return self._over

    def result(self, timeout: float | None = None) -> T:
        """Wait for all ranks and return the joined result.

        `timeout` is in seconds. After a TimeoutError the call continues; call `result` again.

        Raises:
            Exception: The exception of the lowest failing rank; notes hold each failing rank, its node and traceback.
            RankDied: A rank's process or node ended; the group needs a `restart`.
            TimeoutError: Some ranks have not answered; the error names them.
        """
        self._receive(timeout)
        if not self._over:
            raise TimeoutError(
                f"{self._label} did not end within {timeout:g} s; ranks {sorted(self.waiting.values())} still run"
            )
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _receive(self, timeout: float | None) -> None:
        """Take the answers that arrive within `timeout` seconds."""
        ray = import_ray()
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._over:
            if not self.waiting:
                self._end()
                return
            left = min(until, self._deadline) - time.monotonic()
            ready, _ = ray.wait(list(self.waiting), timeout=None if left == float("inf") else max(0.0, left))
            for reference in ready:
                rank = self.waiting.pop(reference)
                try:
                    answer = ray.get(reference)
                except ray.exceptions.RayError as error:
                    where, node = f"rank {rank} (node {self._nodes[rank]})", self._nodes[rank]
                    self.death = RankDied(f"{where} died during {self._label}: {error}", rank, node, self.method)
                    self._end()
                    return
                if isinstance(answer, Raised):
                    self.raised[rank] = answer
                    grace = _DEATH_SECONDS if isinstance(answer.exception(), RuntimeError) else _GRACE_SECONDS
                    self._deadline = min(self._deadline, time.monotonic() + grace)
                else:
                    self._answers[rank] = answer
            if not ready and time.monotonic() >= self._deadline:
                self._end()
            elif not ready and time.monotonic() >= until:
                return

    def _end(self) -> None:
        self._over = True
        self._error = self.death or (self._as_exception() if self.raised else None)
        self._settle(self)
        if self._error is None:
            try:
                self._result = self._join([self._answers[rank] for rank in sorted(self._answers)])
            except Exception as error:
                self._error = error
        # Release the ranks' results in Ray's object store.
        self._answers = {}

    def _as_exception(self) -> Exception:
        first = min(self.raised)
        error = self.raised[first].exception()
        for rank, raised in sorted(self.raised.items()):
            note = f"on rank {rank} (node {self._nodes[rank]}), in {raised.method}:\n{raised.text}"
            if raised.method != self.method:
                note += f"{self._label} was not run after that."
            error.add_note(note)
        return error
