"""Carry boxes of shards from the ranks of an actor to the processes of engines, in rounds.

In a round each rank of the actor sends a part of what each process still needs from it. Two rounds are in flight: one
is packed while the one before travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt.transfer import ShardCopy
from rl_models.calls import checksum as checksum_on_device
from rl_train.weight_sync.transport import Broken, Peer

# Each box begins at a multiple of this number of bytes, as views of any dtype need; a checksum takes as many.
ALIGNMENT = 16

# One peer's copies of each round. The ranks of the actor are the first peers, the engines' processes follow.
Rounds = list[list[ShardCopy]]
# Moves the values of a copy from the model to a buffer, or back.
Move = Callable[[ShardCopy, Tensor], None]


class ShardPlan(NamedTuple):
    """One peer's part of a weight sync.

    Attributes:
        rounds: What this peer sends or receives in each round.
        senders: The number of the actor's ranks.
        check: Whether checksums are compared; one lies before the boxes for each peer.
        changed_only: Whether the weight syncs after the first one carry changed values alone (`changed_values`).
    """

    rounds: Rounds
    senders: int
    check: bool
    changed_only: bool = False


def plans_of(
    copies: Sequence[ShardCopy], senders: int, receivers: int, most_bytes: int, check: bool
) -> list[ShardPlan]:
    """Divide copies into rounds, and return the plan of each peer.

    Args:
        copies: All copies.
        senders: The number of the actor's ranks.
        receivers: The number of the engines' processes.
        most_bytes: The most bytes that a peer sends or receives in a round, where it holds at least one element a pair.
        check: Send checksums.
    """
    pairs: dict[tuple[int, int], list[ShardCopy]] = {}
    for copy in copies:
        pairs.setdefault((copy.held.rank, senders + copy.receiver), []).append(copy)
    peers = Counter(rank for pair in pairs for rank in pair)
    room = max(ALIGNMENT, most_bytes // max(peers.values(), default=1) - ALIGNMENT * check)
    rounds = {pair: list(_rounds(each, room)) for pair, each in pairs.items()}
    count = max(map(len, rounds.values()), default=0)
    plans = [ShardPlan([[] for _ in range(count)], senders, check) for _ in range(senders + receivers)]
    for pair, each in rounds.items():
        for number, part in enumerate(each):
            for rank in pair:
                plans[rank].rounds[number].extend(part)
    return plans


def _rounds(copies: Sequence[ShardCopy], room: int) -> Iterator[list[ShardCopy]]:
    """Yield the copies of one pair in rounds of at most `room` bytes; parts of a quarter fill most of a round."""
    taken: list[ShardCopy] = []
    size, quarter = 0, max(ALIGNMENT, room // 4)
    for copy in chain.from_iterable(copy.cut(quarter) for copy in copies):
        if taken and size + aligned(copy.nbytes) > room:
            yield taken
            taken, size = [], 0
        taken.append(copy)
        size += aligned(copy.nbytes)
    if taken:
        yield taken


def exchange_shards(peer: Peer, plan: ShardPlan, move: Move, broken: Broken = lambda: False) -> None:
    """Carry out a peer's part of a plan; all peers call this.

    Args:
        peer: This process in the group.
        plan: Its part.
        move: Packs a copy on a rank of the actor, and writes it into the parameters in an engine.
        broken: See `Peer`.

    Raises:
        BucketMissed: A peer ended, left or was too slow.
        ValueError: A checksum differs.
    """
    carry_rounds(peer, _rounds_of(peer, plan, move), broken)


class Round(NamedTuple):
    """The bytes that a peer sends or receives in a round, those for each peer, and what follows when they are there."""

    data: Tensor
    sizes: list[int]
    sends: bool
    finish: Callable[[], None] = lambda: None

    def begin(self, peer: Peer, broken: Broken) -> Any:
        """Begin the exchange; see `Peer.wait`."""
        nothing, zeros = self.data.new_empty(0), [0] * len(self.sizes)
        if self.sends:
            return peer.exchange(self.data, self.sizes, nothing, zeros, broken)
        return peer.exchange(nothing, zeros, self.data, self.sizes, broken)


def carry_rounds(peer: Peer, rounds: Iterable[Round], broken: Broken) -> None:
    """Exchange rounds; the next round is made while one travels. See `exchange_shards`."""
    under_way: list[tuple[Round, Any]] = []
    try:
        for each in chain(rounds, [None]):
            if each is not None:
                under_way.append((each, each.begin(peer, broken)))
            if len(under_way) > (each is not None):
                peer.wait(under_way[0][1], broken)
                under_way[0][0].finish()
                del under_way[0]
    finally:
        # The frames of an error keep operations, and these the group, for whose end the other peers would wait.
        under_way.clear()
    if device_of(peer) == "cuda":
        torch.cuda.current_stream().synchronize()


def device_of(peer: Peer) -> str:
    """Return the device type of the bytes that a peer exchanges."""
    return "cuda" if peer.rendezvous.backend == "nccl" else "cpu"


def _rounds_of(peer: Peer, plan: ShardPlan, move: Move) -> Iterator[Round]:
    """Yield rounds of whole boxes."""
    rank, size = peer.rendezvous.rank, peer.rendezvous.size
    sends = rank < plan.senders
    parts = [_Part.of_round(copies, sends, size, plan) for copies in plan.rounds]
    length = max((part.length for part in parts), default=0)
    ring = torch.empty(2, length, dtype=torch.uint8, device=device_of(peer))
    for number, part in enumerate(parts):
        data = ring[number % 2, : part.length]
        if sends:
            part.pack(data, move)
            yield Round(data, part.sizes, sends)
        else:
            yield Round(data, part.sizes, sends, partial(part.unpack, data, move))


def by_peer(copies: Sequence[ShardCopy], sends: bool, plan: ShardPlan) -> list[tuple[int, ShardCopy]]:
    """Return the copies of a round with the peer on the other side, in the order of the peers."""
    other = [plan.senders + copy.receiver if sends else copy.held.rank for copy in copies]
    return sorted(zip(other, copies, strict=True), key=lambda pair: pair[0])


class _Part(NamedTuple):
    """A peer's copies of one round: the first byte of each, the bytes for each peer, and those of the checksums."""

    boxes: list[tuple[int, ShardCopy]]
    sizes: list[int]
    check: bool

    @classmethod
    def of_round(cls, copies: Sequence[ShardCopy], sends: bool, size: int, plan: ShardPlan) -> _Part:
        sizes, boxes, begin = [0] * size, list[tuple[int, ShardCopy]](), 0
        room = ALIGNMENT * plan.check
        for peer, copy in by_peer(copies, sends, plan):
            head = 0 if sizes[peer] else room
            boxes.append((begin + head, copy))
            length = head + aligned(copy.nbytes)
            sizes[peer] += length
            begin += length
        return cls(boxes, sizes, plan.check)

    @property
    def length(self) -> int:
        """The number of bytes of the round."""
        return sum(self.sizes)

    def pack(self, data: Tensor, move: Move) -> None:
        """Write the boxes and the checksums into the bytes of the round."""
        for begin, copy in self.boxes:
            move(copy, data[begin : begin + copy.nbytes].view(copy.dtype))
        for segment, stated in self._checksums(data):
            stated.copy_(checksum_on_device(segment))

    def unpack(self, data: Tensor, move: Move) -> None:
        """Compare the checksums, and write the boxes into the parameters."""
        for segment, stated in self._checksums(data):
            if int(stated) != int(checksum_on_device(segment)):
                names = ", ".join(copy.local for _, copy in self.boxes[:3])
                raise ValueError(f"{names} arrived with other bits than were sent: the checksum of their round differs")
        for begin, copy in self.boxes:
            move(copy, data[begin : begin + copy.nbytes].view(copy.dtype))

    def _checksums(self, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes for each peer, and the number that holds their checksum."""
        begin = 0
        for size in self.sizes if self.check else ():
            if size:
                segment = data[begin : begin + size]
                yield segment[ALIGNMENT:], segment[: ALIGNMENT // 2].view(torch.int64)[0]
            begin += size


def aligned(size: int) -> int:
    """Return the bytes of a box with what lies behind it, up to the next one."""
    return -(-size // ALIGNMENT) * ALIGNMENT
