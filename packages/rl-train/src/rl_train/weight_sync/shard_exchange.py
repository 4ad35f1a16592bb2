"""Carry boxes of shards from the ranks of an actor to the processes of engines, in rounds.

In a round each rank of the actor sends a part of what each process still needs from it. Two rounds are in flight: one
is packed while the one before travels. A receiver sends relayed values on two rounds after they came, see `relays`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt.transfer import ShardCopy
from parallel_layers.device import GPU, gpu
from rl_models.calls import checksum
from rl_train.weight_sync.buckets import ALIGNMENT, aligned
from rl_train.weight_sync.relays import Relay, by_source, most_boxes, relays
from rl_train.weight_sync.transport import Broken, Peer

# The next round is packed before a round is in the parameters.
_ROUNDS_TO_RELAY = 2

# One peer's copies of each round. The ranks of the actor are the first peers, the engines' processes follow.
Rounds = list[list[ShardCopy]]
# Moves the values of a copy from the model to a buffer, or back.
Move = Callable[[ShardCopy, Tensor], None]


class ShardPlan(NamedTuple):
    """One peer's part of a weight sync.

    Attributes:
        rounds: What this peer sends and receives in each round.
        senders: The number of the actor's ranks.
        check: Whether checksums are compared; one lies before the boxes for each peer.
        changed_only: Whether the weight syncs after the first one carry changed values alone (`changed_values`).
    """

    rounds: Rounds
    senders: int
    check: bool
    changed_only: bool = False


def plans_of(
    copies: Sequence[ShardCopy],
    senders: int,
    receivers: int,
    most_bytes: int,
    *,
    check: bool = False,
    changed_only: bool = False,
) -> list[ShardPlan]:
    """Divide copies into rounds, and return the plan of each peer: of the senders, and then of the receivers.

    A peer sends or receives `most_bytes` in a round, where that holds at least one element a pair. With `changed_only`
    the plan is for changed values, which are few: no engine sends them on.
    """
    groups = [[copy] for copy in copies] if changed_only else by_source(copies)
    room = max(ALIGNMENT, most_bytes // most_boxes(groups) - ALIGNMENT * check)
    pairs: dict[tuple[int, int], list[Relay]] = {}
    for relay in relays(groups, senders, max(ALIGNMENT, room // 4)):  # parts of a quarter fill most of a round
        pairs.setdefault((relay.copy.held.rank, relay.copy.receiver), []).append(relay)
    rounds: list[list[ShardCopy]] = []
    for each in pairs.values():
        for number, relay in _rounds(each, room):
            later = number + _ROUNDS_TO_RELAY * bool(relay.onward)
            rounds += [[] for _ in range(len(rounds), later + 1)]
            rounds[number].append(relay.copy)
            rounds[later] += relay.onward
    plans = [ShardPlan([[] for _ in rounds], senders, check, changed_only) for _ in range(senders + receivers)]
    for number, part in enumerate(rounds):
        for copy in part:
            for rank in (copy.held.rank, senders + copy.receiver):
                plans[rank].rounds[number].append(copy)
    return plans


def _rounds(each: Sequence[Relay], room: int) -> Iterator[tuple[int, Relay]]:
    """Yield what one rank sends to one receiver, and the number of its round; a round has at most `room` bytes."""
    number = size = 0
    for relay in each:
        length = aligned(relay.copy.nbytes)
        if size and size + length > room:
            number, size = number + 1, 0
        size += length
        yield number, relay


def exchange_shards(
    peer: Peer, plan: ShardPlan, read: Move, write: Move | None = None, broken: Broken = lambda: False
) -> None:
    """Carry out a peer's part of a plan; all peers call this. A rank of the actor receives nothing to `write`.

    Raises:
        BucketMissed: A peer ended, left or was too slow.
        ValueError: A checksum differs.
    """
    carry_rounds(peer, _rounds_of(peer, plan, read, write), broken)


class Round(NamedTuple):
    """The bytes that a peer sends and receives in a round, and their number for and from each peer.

    `finish` is called when the bytes are there.
    """

    sent: Tensor
    sent_sizes: list[int]
    received: Tensor
    received_sizes: list[int]
    finish: Callable[[], None] = lambda: None

    @classmethod
    def one_way(cls, data: Tensor, sizes: list[int], sends: bool, finish: Callable[[], None] = lambda: None) -> Round:
        """Return a round in which this peer sends alone, or receives alone."""
        nothing = data.new_empty(0), [0] * len(sizes)
        return cls(data, sizes, *nothing, finish) if sends else cls(*nothing, data, sizes, finish)

    def begin(self, peer: Peer, broken: Broken) -> Any:
        """Begin the exchange; see `Peer.wait`."""
        return peer.exchange(self.sent, self.sent_sizes, self.received, self.received_sizes, broken)


def carry_rounds(peer: Peer, rounds: Iterable[Round], broken: Broken) -> None:
    """Exchange rounds; the next round is made while one travels. See `exchange_shards`."""
    under_way: list[tuple[Round, Any]] = []
    for each in chain(rounds, [None]):
        if each is not None:
            under_way.append((each, each.begin(peer, broken)))
        if len(under_way) > (each is not None):
            peer.wait(under_way[0][1], broken)
            under_way[0][0].finish()
            del under_way[0]
    if device_of(peer) == GPU:
        gpu.current_stream().synchronize()


def device_of(peer: Peer) -> str:
    """Return the device type of the bytes that a peer exchanges."""
    return GPU if peer.rendezvous.backend == "nccl" else "cpu"


def _rounds_of(peer: Peer, plan: ShardPlan, read: Move, write: Move | None) -> Iterator[Round]:
    """Yield rounds of whole boxes."""
    sent, received = ([_Part.of_round(peer, copies, sends, plan) for copies in plan.rounds] for sends in (True, False))
    lengths = [max((part.length for part in parts), default=0) for parts in (sent, received)]
    out, into = (torch.empty(2, length, dtype=torch.uint8, device=device_of(peer)) for length in lengths)
    for number, (sends, receives) in enumerate(zip(sent, received, strict=True)):
        data, arriving = out[number % 2, : sends.length], into[number % 2, : receives.length]
        sends.pack(data, read)
        yield Round(data, sends.sizes, arriving, receives.sizes, partial(receives.unpack, arriving, write))


def by_peer(peer: Peer, copies: Sequence[ShardCopy], sends: bool, plan: ShardPlan) -> list[tuple[int, ShardCopy]]:
    """Return what a peer sends or receives in a round with the peer on the other side, in the order of the peers."""
    here = [copy for copy in copies if (copy.held.rank == peer.rendezvous.rank) == sends]
    other = [plan.senders + copy.receiver if sends else copy.held.rank for copy in here]
    return sorted(zip(other, here, strict=True), key=lambda pair: pair[0])


class _Part(NamedTuple):
    """The boxes that a peer sends or receives in one round, each with its first byte, and the bytes of each peer."""

    boxes: list[tuple[int, ShardCopy]]
    sizes: list[int]
    check: bool

    @classmethod
    def of_round(cls, peer: Peer, copies: Sequence[ShardCopy], sends: bool, plan: ShardPlan) -> _Part:
        sizes, boxes, begin = [0] * peer.rendezvous.size, list[tuple[int, ShardCopy]](), 0
        room = ALIGNMENT * plan.check
        for other, copy in by_peer(peer, copies, sends, plan):
            head = 0 if sizes[other] else room
            boxes.append((begin + head, copy))
            length = head + aligned(copy.nbytes)
            sizes[other] += length
            begin += length
        return cls(boxes, sizes, plan.check)

    @property
    def length(self) -> int:
        """The number of bytes of the round."""
        return sum(self.sizes)

    def pack(self, data: Tensor, read: Move) -> None:
        """Write the boxes and the checksums into the bytes of the round."""
        for begin, copy in self.boxes:
            read(copy, data[begin : begin + copy.nbytes].view(copy.dtype))
        for segment, stated in self._checksums(data):
            stated.copy_(checksum(segment))

    def unpack(self, data: Tensor, write: Move | None) -> None:
        """Compare the checksums, and write the boxes into the parameters."""
        for segment, stated in self._checksums(data):
            if int(stated) != int(checksum(segment)):
                names = ", ".join(copy.local for _, copy in self.boxes[:3])
                raise ValueError(f"{names} arrived with other bits than were sent: the checksum of their round differs")
        for begin, copy in self.boxes:
            assert write is not None
            write(copy, data[begin : begin + copy.nbytes].view(copy.dtype))

    def _checksums(self, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes for each peer, and the number that holds their checksum."""
        begin = 0
        for size in self.sizes if self.check else ():
            if size:
                segment = data[begin : begin + size]
                yield segment[ALIGNMENT:], segment[: ALIGNMENT // 2].view(torch.int64)[0]
            begin += size
