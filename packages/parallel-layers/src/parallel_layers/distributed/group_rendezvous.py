"""`meet` checks that all ranks are about to form the same process group; `agreed_name` names it alike on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]


def meet(members: list[int], what: str) -> None:
    """Wait until all members are about to form `what`; they tell each other through the default group's store.

    Raises:
        ValueError: Members form different groups, or wait for each other with different lists of members; on every
            waiting member.
        TimeoutError: A member did not come within the time limit of the store; names the missing ranks.
    """
    store, me = _default_store(), dist.get_rank()
    name = "parallel_layers/grid/" + ",".join(map(str, members))
    # Successful and failed rendezvous of this list of members before; the same numbers on every member.
    successes, failed = store.add(f"{name}/done/{me}", 0), 0
    while store.check([f"{name}/{successes}/{failed}/reason"]):
        failed += 1
    meeting = _Meeting(members, f"{name}/{successes}/{failed}")
    store.set(f"{meeting.key}/{me}", what)
    store.set(_entry(me), json.dumps(meeting))
    try:
        _wait(store, meeting, what)
    except TimeoutError:
        store.delete_key(f"{meeting.key}/{me}")  # a member that comes later does not take this rank for present
        raise
    finally:
        store.set(_entry(me), "")
    purposes = [store.get(f"{meeting.key}/{rank}").decode() for rank in members]
    store.add(f"{name}/done/{me}", 1)
    for rank, purpose in zip(members, purposes, strict=True):
        if purpose != purposes[0]:
            raise ValueError(
                f"rank {members[0]} forms {purposes[0]} and rank {rank} {purpose}; form the same grids in the same "
                "order on every rank"
            )


@contextlib.contextmanager
def agreed_name(ranks: list[int]) -> Iterator[None]:
    """Inside, `new_group(ranks)` names the group by its ranks and by the number of such groups before.

    torch itself counts all groups of the process (2.11 to 2.13) or all calls of `new_group` (from 2.14). Ranks that
    have formed different groups would name their next common group differently, and wait for each other for ever. Here
    torch counts nothing, so that groups of a few ranks leave the names of later groups as they are.
    """
    key = f"parallel_layers/groups/{','.join(map(str, ranks))}"
    number = _default_store().add(f"{key}/{dist.get_rank()}", 1)
    name = dist.distributed_c10d.GroupName(hashlib.sha256(f"{key}/{number}".encode()).hexdigest())
    torch_name = dist.distributed_c10d._process_group_name
    dist.distributed_c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        dist.distributed_c10d._process_group_name = torch_name


def existing_groups() -> list[ProcessGroup]:
    """Return all process groups of this process that have not been destroyed."""
    return list(dist.distributed_c10d._world.pg_map)


def _default_store() -> Store:
    return dist.distributed_c10d._get_default_store()


class _Meeting(NamedTuple):
    """A rendezvous, one call of `meet`: its members, and the prefix of its keys in the store."""

    members: list[int]
    key: str


def _entry(rank: int) -> str:
    """Return the key under which a rank stores the rendezvous in which it waits."""
    return f"parallel_layers/waits/{rank}"


def _meeting_of(store: Store, rank: int) -> _Meeting | None:
    """Return the rendezvous in which a rank waits; None: it waits in none."""
    text = store.get(_entry(rank)) if store.check([_entry(rank)]) else b""
    return _Meeting(*json.loads(text)) if text else None


def _missing(store: Store, members: list[int], key: str) -> list[int]:
    """Return the members that have not arrived, by bisection: one request to the store covers many members."""
    if store.check([f"{key}/{rank}" for rank in members]):
        return []
    half = len(members) // 2
    return members if not half else _missing(store, members[:half], key) + _missing(store, members[half:], key)


def _wait(store: Store, meeting: _Meeting, what: str) -> None:
    """Wait for all members; raise if members wait for each other on different lists."""
    members, key = meeting
    limit: float = store.timeout.total_seconds()  # type: ignore[attr-defined]
    deadline = time.monotonic() + limit
    pause = 0.25
    while True:
        with contextlib.suppress(RuntimeError):  # the store's error after `pause` seconds
            store.wait([f"{key}/{rank}" for rank in members], timedelta(seconds=pause))
            return
        pause = min(2 * pause, 8.0)
        missing = _missing(store, members, key)
        if any(_meeting_of(store, rank) for rank in missing):
            _fail_if_stuck(store)
        if store.check([f"{key}/reason"]):
            raise ValueError(store.get(f"{key}/reason").decode())
        if missing and time.monotonic() > deadline:
            raise TimeoutError(
                f"ranks {missing} did not come to form {what} on ranks {members} within {limit:.0f} s; call it on all "
                "of these ranks"
            )


def _fail_if_stuck(store: Store) -> None:
    """Let the lowest deadlocked rank publish the error to every blocked rendezvous.

    A rank in a rendezvous waits for the members that have not arrived. Ranks on a cycle of this relation are
    deadlocked.
    """
    meetings = {rank: blocked for rank in range(dist.get_world_size()) if (blocked := _meeting_of(store, rank))}
    waits = {rank: _missing(store, *meeting) for rank, meeting in meetings.items()}
    stuck = {rank for rank, missing in waits.items() if missing}
    while free := {rank for rank in stuck if not stuck.intersection(waits[rank])}:
        stuck -= free
    reasons = [f"{meetings[rank].key}/reason" for rank in stuck]
    me = dist.get_rank()
    # An error is published: some ranks left their rendezvous while this rank read the store.
    if me != min(stuck, default=None) or any(store.check([key]) for key in reasons):
        return
    peer = next(rank for rank in waits[me] if rank in stuck)
    for key in reasons:
        store.set(
            key,
            f"rank {me} forms a group of ranks={meetings[me].members} and rank {peer} a group of "
            f"ranks={meetings[peer].members}, and they would wait for ever; give the same ranks, in the same order of "
            "calls, on every member",
        )
