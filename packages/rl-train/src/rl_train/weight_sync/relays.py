"""Relays: a box that several processes of engines need is sent to one of them, which sends it on to the others.

A rank of the actor then sends each of its boxes once, however many engines it feeds, and the engines share the rest of
the work: with N engines on equal links, the weight sync takes the time of one engine, not of N.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpt.transfer import ShardCopy


class Relay(NamedTuple):
    """A copy from a rank of the actor, and the copies by which its receiver sends the values on."""

    copy: ShardCopy
    onward: list[ShardCopy]


def by_source(copies: Sequence[ShardCopy]) -> list[list[ShardCopy]]:
    """Group the copies of one box to several receivers; each is alone where the receivers are the slower side."""
    sent, received = Counter[int](), Counter[int]()
    for copy in copies:
        sent[copy.held.rank] += copy.nbytes
        received[copy.receiver] += copy.nbytes
    if max(sent.values(), default=0) <= max(received.values(), default=0):
        return [[copy] for copy in copies]
    groups: dict[tuple[object, ...], list[ShardCopy]] = {}
    for copy in copies:
        held = copy.held
        key = held.rank, held.chunk, held.local, copy.copy.source_range, copy.dtype
        groups.setdefault(key, []).append(copy)
    return list(groups.values())


def most_boxes(groups: Sequence[Sequence[ShardCopy]]) -> int:
    """Return the most boxes that a peer sends or receives in a round, with one box from each rank to each receiver."""
    senders, receivers, partners = dict[int, set[int]](), dict[int, set[int]](), dict[int, set[int]]()
    for group in groups:
        for copy in group:
            senders.setdefault(copy.receiver, set()).add(copy.held.rank)
            receivers.setdefault(copy.held.rank, set()).add(copy.receiver)
            partners.setdefault(copy.receiver, set()).update(other.receiver for other in group)
    relayed = max(map(len, senders.values()), default=1) * max(map(len, partners.values()), default=1)
    return max(relayed, *map(len, receivers.values()), 1)


def relays(groups: Sequence[Sequence[ShardCopy]], senders: int, most_bytes: int) -> Iterator[Relay]:
    """Yield the boxes of groups (`by_source`) in parts of at most `most_bytes`, spread evenly over the first receivers.

    The receivers are counted behind the senders, the actor's ranks.
    """
    load = Counter[tuple[int, int]]()
    for group in groups:
        for parts in zip(*(copy.cut(most_bytes) for copy in group), strict=True):
            first = min(parts, key=lambda part: load[part.held.rank, part.receiver])
            load[first.held.rank, first.receiver] += first.nbytes
            yield Relay(first, [_onward(first, part, senders) for part in parts if part is not first])


def _onward(first: ShardCopy, other: ShardCopy, senders: int) -> ShardCopy:
    """Return the copy from the parameters that `first` fills to those that `other` fills."""
    held = dataclasses.replace(first.held, rank=senders + first.receiver, chunk=first.chunk, local=first.local)
    boxes = dataclasses.replace(other.copy, source_range=first.copy.destination_range)
    return dataclasses.replace(other, held=held, copy=boxes)
