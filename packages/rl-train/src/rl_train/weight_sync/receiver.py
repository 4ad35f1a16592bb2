"""`WeightReceiver`: an engine's side of weight syncs."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from traceback import clear_frames
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from parallel_layers.device import gpu
from rl_train.weight_sync.buckets import Bucket, BucketPlan, unpack
from rl_train.weight_sync.changed_values import receive_changes
from rl_train.weight_sync.shard_exchange import ShardPlan, device_of, exchange_shards
from rl_train.weight_sync.transport import Peer, WeightMessage


class WeightReceiver:
    """Receive weights in a process of an engine; the process group and the plan stay for the next weight sync.

    Attributes:
        key: A name of this process.
    """

    def __init__(self) -> None:
        self.key = uuid4().hex
        self._peer: Peer | None = None
        self._plan: list[BucketPlan] = []
        self._shards = ShardPlan([], 0, check=False)

    def receive(self, message: WeightMessage) -> Generator[tuple[str, Tensor]]:
        """Yield the tensors of a weight sync, as `unpack`; BucketMissed where a bucket did not arrive."""
        try:
            yield from unpack(self._buckets(message))
        except BaseException as error:  # also where the engine takes no more tensors
            clear_frames(error.__traceback__)  # they keep operations, and these the group
            self.close()
            raise

    def fill(self, message: WeightMessage, chunks: Sequence[Mapping[str, Tensor]]) -> None:
        """Write the boxes of a weight sync into parameters, by local name for each chunk; see `ShardSender`.

        Raises:
            BucketMissed: Some boxes did not arrive; call `close`.
        """
        peer = self._join(message)
        if message.plan:
            self._shards = peer.published(f"{message.plan} {message.rendezvous.rank}")
        elif self._shards.changed_only:
            receive_changes(peer, self._shards, chunks)
            return
        exchange_shards(
            peer,
            self._shards,
            read=lambda copy, buffer: copy.read_received(chunks, buffer),
            write=lambda copy, buffer: copy.write(chunks, buffer),
        )

    def close(self) -> None:
        """Leave the process group. Safe to call twice."""
        if self._peer is not None:
            self._peer.close()
        self._peer = None

    def _join(self, message: WeightMessage) -> Peer:
        if self._peer is None or self._peer.rendezvous != message.rendezvous:
            self.close()
            self._peer = Peer(message.rendezvous)
        return self._peer

    def _buckets(self, message: WeightMessage) -> Iterator[Bucket]:
        peer = self._join(message)
        ring = None if message.ring is None else message.ring.open()
        received: list[BucketPlan] = []
        for plan in _published(peer, message.plan) if message.plan else [self._plan]:
            if ring is not None:
                yield from _in_place(peer, plan, ring, len(received) % 2)
            else:
                yield from _broadcast(peer, plan)
            received += plan
        _synchronize()  # the sender may overwrite its ring
        self._plan = received


def _published(peer: Peer, name: str) -> Iterator[list[BucketPlan]]:
    """Yield each bucket's contents when the sender publishes them."""
    for number in itertools.count():
        if not (entries := peer.published(f"{name} {number}")):
            return
        yield [entries]


def _in_place(peer: Peer, plan: list[BucketPlan], ring: Tensor, half: int) -> Iterator[Bucket]:
    """Yield buckets where the sender packs them; it packs a bucket while the one before is read."""
    for number, entries in enumerate(plan):
        _synchronize()
        peer.wait(peer.meet())
        yield Bucket(entries, ring, (half + number) % 2)


def _broadcast(peer: Peer, plan: list[BucketPlan]) -> Iterator[Bucket]:
    """Yield buckets that the sender broadcasts; the next one arrives while a bucket is read."""
    if not plan:
        return
    most = max(entries[-1].end for entries in plan)
    ring = torch.empty(min(2, len(plan)), most, dtype=torch.uint8, device=device_of(peer))
    works: list[Any] = []
    for number, entries in enumerate(plan):
        for ahead in plan[number + len(works) : number + 2]:
            works.append(peer.broadcast(Bucket(ahead, ring, (number + len(works)) % 2).data))
        peer.wait(works.pop(0))
        yield Bucket(entries, ring, number % 2)


def _synchronize() -> None:
    """Wait for the copies from the buckets so far."""
    if gpu.is_available():
        gpu.current_stream().synchronize()
