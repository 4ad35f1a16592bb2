"""Carry boxes of shards from the ranks of an actor to the processes of engines, in rounds.

In a round each rank of the actor sends a part of what each process still needs from it. Two rounds are in flight: one
is packed while the one before travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt.transfer import ShardCopy
from rl_models.calls import checksum as checksum_on_device
from rl_train.weight_sync.transport import Broken, Peer

# Each box begins at a multiple of this number of bytes, as views of any dtype need; a checksum takes as many.
_ALIGNMENT = 16

# One peer's copies of each round. The ranks of the actor are the first peers, the engines' processes follow.
Rounds = list[list[ShardCopy]]
# Moves the values of a copy from the model to a buffer, or back.
Move = Callable[[ShardCopy, Tensor], None]


class ShardPlan(NamedTuple):
    """One peer's part of a weight sync.

    Attributes:
        rounds: What this peer sends or receives in each round.
        senders: The number of the actor's ranks.
        check: Whether a checksum lies before the boxes for each peer.
    """

    rounds: Rounds
    senders: int
    check: bool


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
    room = max(_ALIGNMENT, most_bytes // max(peers.values(), default=1) - _ALIGNMENT * check)
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
    size, quarter = 0, max(_ALIGNMENT, room // 4)
    for copy in chain.from_iterable(copy.cut(quarter) for copy in copies):
        if taken and size + _aligned(copy.nbytes) > room:
            yield taken
            taken, size = [], 0
        taken.append(copy)
        size += _aligned(copy.nbytes)
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
    rank, size = peer.rendezvous.rank, peer.rendezvous.size
    sends = rank < plan.senders
    parts = [_Part.of_round(copies, sends, size, plan) for copies in plan.rounds]
    device = "cuda" if peer.rendezvous.backend == "nccl" else "cpu"
    length = max((part.length for part in parts), default=0)
    ring, nothing = (torch.empty(*shape, dtype=torch.uint8, device=device) for shape in ((2, length), (0,)))
    works: list[Any] = []
    for number in range(len(parts) + 1):
        if number < len(parts):
            part, data = parts[number], ring[number % 2, : parts[number].length]
            zeros = [0] * size
            if sends:
                part.pack(data, move)
                works.append(peer.exchange(data, part.sizes, nothing, zeros, broken))
            else:
                works.append(peer.exchange(nothing, zeros, data, part.sizes, broken))
        if number:
            peer.wait(works.pop(0), broken)
            if not sends:
                parts[number - 1].unpack(ring[(number - 1) % 2], move)
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


class _Part(NamedTuple):
    """A peer's copies of one round: the first byte of each, the bytes for each peer, and those of the checksums."""

    boxes: list[tuple[int, ShardCopy]]
    sizes: list[int]
    check: bool

    @classmethod
    def of_round(cls, copies: Sequence[ShardCopy], sends: bool, size: int, plan: ShardPlan) -> _Part:
        sizes, boxes, begin = [0] * size, list[tuple[int, ShardCopy]](), 0
        room = _ALIGNMENT * plan.check
        other = [plan.senders + copy.receiver if sends else copy.held.rank for copy in copies]
        for peer, copy in sorted(zip(other, copies, strict=True), key=lambda pair: pair[0]):
            head = 0 if sizes[peer] else room
            boxes.append((begin + head, copy))
            length = head + _aligned(copy.nbytes)
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
                yield segment[_ALIGNMENT:], segment[: _ALIGNMENT // 2].view(torch.int64)[0]
            begin += size


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
