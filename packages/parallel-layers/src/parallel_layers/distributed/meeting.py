"""`meet`: check that all ranks are about to form the same process group before they form it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store


def meet(members: list[int], what: str) -> None:
    """Wait until all members are about to form `what`, and bring all of them to the same number of groups.

    With `use_local_synchronization` torch names a group by its ranks and by the number of groups of the process. If
    these numbers differ between members, the names differ and `new_group` waits for ever. The members exchange their
    numbers through the default group's store; a member with fewer groups forms groups of itself alone.

    Raises:
        ValueError: Members form different groups, or wait for each other with different lists of members; on every
            waiting member.
        TimeoutError: A member did not come within the time limit of the store; names the missing ranks.
    """
    store = dist.distributed_c10d._get_default_store()
    me = dist.get_rank()
    meeting = _Meeting.next(store, members, what)
    store.set(meeting.key(me), f"{_group_count()} {what}")
    store.set(_Meeting.entry(me), json.dumps(dataclasses.asdict(meeting)))
    try:
        _wait(store, meeting)
    finally:
        store.set(_Meeting.entry(me), "")
    told = [store.get(meeting.key(rank)).decode().split(" ", 1) for rank in members]
    store.add(f"{meeting.name}/done/{me}", 1)
    for rank, (_, other) in zip(members, told, strict=True):
        if other != told[0][1]:
            raise ValueError(
                f"rank {members[0]} forms {told[0][1]} and rank {rank} {other}; form the same grids in the same order "
                "on every rank"
            )
    while _group_count() < max(int(count) for count, _ in told):
        dist.new_group([me], use_local_synchronization=True)


@dataclass(frozen=True)
class _Meeting:
    """One call of `meet` on a list of members, and its keys in the store."""

    members: list[int]
    what: str
    done: int
    """Earlier meetings on this list that succeeded; the same number on every member."""
    failed: int
    """Earlier meetings on this list that failed."""

    @classmethod
    def next(cls, store: Store, members: list[int], what: str) -> _Meeting:
        """Return the meeting that this rank's call belongs to."""
        new = cls(members, what, 0, 0)
        return cls(members, what, store.add(f"{new.name}/done/{dist.get_rank()}", 0), new.count_failed(store))

    @classmethod
    def of(cls, store: Store, rank: int) -> _Meeting | None:
        """Return the meeting that a rank waits in, or None."""
        text = store.get(cls.entry(rank)).decode() if store.check([cls.entry(rank)]) else ""
        return cls(**json.loads(text)) if text else None

    @staticmethod
    def entry(rank: int) -> str:
        """Return the key under which a rank stores the meeting that it waits in."""
        return f"parallel_layers/waits/{rank}"

    @property
    def name(self) -> str:
        """Return the prefix of the keys of all meetings on this list."""
        return "parallel_layers/grid/" + ",".join(map(str, self.members))

    def key(self, rank: int) -> str:
        """Return the key under which a member arrives."""
        return f"{self.name}/{self.done}/{self.failed}/{rank}"

    def missing(self, store: Store) -> list[int]:
        """Return the members that have not arrived, by bisection: one request to the store covers many members."""
        todo, missing = [self.members], []
        while todo:
            part = todo.pop()
            if store.check([self.key(rank) for rank in part]):
                continue
            if len(part) == 1:
                missing += part
            else:
                todo += [part[len(part) // 2 :], part[: len(part) // 2]]
        return missing

    def count_failed(self, store: Store) -> int:
        """Return how many meetings on this list have failed."""
        return int(store.get(f"{self.name}/failed")) if store.check([f"{self.name}/failed"]) else 0

    def fail(self, store: Store, reason: str) -> None:
        """Let every waiting member raise `reason`."""
        store.set(f"{self.name}/{self.done}/{self.failed}/reason", reason)
        store.set(f"{self.name}/failed", str(self.failed + 1))

    def reason(self, store: Store) -> str:
        """Return why this meeting failed."""
        return store.get(f"{self.name}/{self.done}/{self.failed}/reason").decode()


def _wait(store: Store, meeting: _Meeting) -> None:
    """Wait for all members; raise if members wait for each other on different lists."""
    limit: float = store.timeout.total_seconds()  # type: ignore[attr-defined]
    deadline = time.monotonic() + limit
    pause = 0.25
    while True:
        with contextlib.suppress(RuntimeError):  # the store's error after `pause` seconds
            store.wait([meeting.key(rank) for rank in meeting.members], timedelta(seconds=pause))
            return
        pause = min(2 * pause, 8.0)
        if any(_Meeting.of(store, rank) for rank in meeting.missing(store)):
            _fail_if_stuck(store)
        if meeting.count_failed(store) > meeting.failed:
            raise ValueError(meeting.reason(store))
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"ranks {meeting.missing(store)} did not come to form {meeting.what} on ranks {meeting.members} within "
                f"{limit:.0f} s; call it on all of these ranks"
            )


def _fail_if_stuck(store: Store) -> None:
    """On the smallest stuck rank, fail the meetings that can never succeed.

    A rank in a meeting waits for the members that have not arrived. Ranks on a cycle of this relation are stuck.
    """
    meetings = {rank: _Meeting.of(store, rank) for rank in range(dist.get_world_size())}
    waits = {rank: [] if each is None else each.missing(store) for rank, each in meetings.items()}
    stuck = {rank for rank, missing in waits.items() if missing}
    while free := {rank for rank in stuck if not stuck.intersection(waits[rank])}:
        stuck -= free
    failing = {rank: each for rank, each in meetings.items() if each is not None and rank in stuck}
    if min(stuck, default=None) != dist.get_rank():
        return
    if any(each.count_failed(store) > each.failed for each in failing.values()):
        return  # some ranks left their meetings while this rank read the store
    one, other = dist.get_rank(), next(rank for rank in waits[dist.get_rank()] if rank in stuck)
    reason = (
        f"rank {one} forms a group of ranks={failing[one].members} and rank {other} one of "
        f"ranks={failing[other].members}, and they would wait for ever; give the same ranks, in the same order of "
        "calls, on every member"
    )
    for each in failing.values():
        each.fail(store, reason)


def _group_count() -> int:
    return len(dist.distributed_c10d._world.pg_names)
