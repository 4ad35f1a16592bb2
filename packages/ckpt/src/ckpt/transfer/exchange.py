"""Move pieces between ranks: a rank that holds a box sends the box to the ranks that want it, in bounded buckets.

Every rank derives the same list of moves from the layouts (`plan_moves`), without negotiation. A bucket is one
`all_to_all_single` of bytes; a box larger than a bucket is cut along its leading dimensions. Extra memory: a send and a
receive buffer of at most `bucket_bytes` each, rounded up to the alignment.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.layout.pieces import Box, Copy, Piece, carried_over, extents, intersect, split_box, volume
from ckpt.transfer.agreement import group_device
from ckpt.transfer.holdings import HeldPiece, Holdings

BUCKET_BYTES = 64 << 20
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class WantedPiece:
    """A piece that ranks want, and their name for the tensor; the ranks of two wants are equal or disjoint."""

    ranks: frozenset[int]
    tensor: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class _Move:
    held: HeldPiece
    want: WantedPiece
    copy: Copy
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return volume(self.copy.source_range) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """This rank's moves in one collective, whether any rank sends data, and the names that are complete afterwards."""

    moves: list[_Move]
    travels: bool
    done: list[str]


Deliver = Callable[[WantedPiece, Box, Tensor], None]


def plan_moves(
    holdings: Holdings, wants: Iterable[tuple[list[HeldPiece], WantedPiece]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Yield the buckets that bring every wanted piece to its ranks; nothing is communicated.

    The work is linear in the number of ranks: one move serves all ranks that want a piece.

    Args:
        holdings: The ranks' tensors.
        wants: Owned pieces, and the wanted piece that they fill; in the same order on every rank.
        bucket_bytes: The most that one rank sends or receives at once (rounded up to 16 bytes).
    """
    rank = holdings.rank
    sent: dict[int, int] = {}
    received: dict[frozenset[int], int] = {}
    mine: list[_Move] = []
    done: list[str] = []
    travels = False
    for owned, want in wants:
        receivers = want.ranks
        for move in _moves(owned, want, holdings.dtypes[want.piece.name], bucket_bytes):
            holder = move.held.rank
            into = received.get(receivers, 0) + _aligned(move.nbytes)
            out = sent.get(holder, 0) + _aligned(move.nbytes) * len(receivers)
            if max(into, out) > bucket_bytes and received:
                yield Bucket(mine, travels, done)
                sent, received, mine, done, travels = {}, {}, [], [], False
                into, out = _aligned(move.nbytes), _aligned(move.nbytes) * len(receivers)
            received[receivers], sent[holder] = into, out
            travels = travels or len(receivers) > 1 or holder not in receivers
            if rank == holder or rank in receivers:
                mine.append(move)
        done.append(want.piece.name)
    yield Bucket(mine, travels, done)


def exchange(
    holdings: Holdings, buckets: Iterable[Bucket], group: ProcessGroup | None, deliver: Deliver
) -> Iterator[list[str]]:
    """Bring every wanted piece to its ranks, and yield the names that have become complete.

    Collective over `group`: every rank must consume the iterator to the end. `buckets` come from `plan_moves`, of
    holdings with the same pieces. The receiving rank calls `deliver` with the want, the box in its tensor, and the
    values, which are valid only during the call. Their extents equal the box's, apart from leading dimensions of 1.
    """
    for bucket in buckets:
        _all_to_all(bucket, holdings, group, deliver)
        if bucket.done:
            yield bucket.done


def _moves(owned: list[HeldPiece], want: WantedPiece, dtype: torch.dtype, bucket_bytes: int) -> Iterator[_Move]:
    # A rank sends a part to each of the receivers in one bucket.
    limit = max(1, bucket_bytes // (dtype.itemsize * max(1, len(want.ranks))))
    for holder in owned:
        copy = intersect(holder.piece, want.piece)
        if copy is not None:
            for chunk in split_box(copy.source_range, limit):
                yield _Move(holder, want, Copy(chunk, carried_over(chunk, copy)), dtype)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _all_to_all(bucket: Bucket, holdings: Holdings, group: ProcessGroup | None, deliver: Deliver) -> None:
    rank = holdings.rank
    outgoing: dict[int, list[_Move]] = {}
    incoming: dict[int, list[_Move]] = {}
    for move in bucket.moves:
        if move.held.rank != rank:
            incoming.setdefault(move.held.rank, []).append(move)
            continue
        for peer in move.want.ranks:
            if peer == rank:
                deliver(move.want, move.copy.destination_range, holdings.values(move.held, move.copy.source_range))
            else:
                outgoing.setdefault(peer, []).append(move)
    if group is None or group.size() == 1 or not bucket.travels:
        return
    sides = [[side.get(peer, []) for peer in range(group.size())] for side in (outgoing, incoming)]
    sizes = [[sum(_aligned(move.nbytes) for move in moves) for moves in side] for side in sides]
    device = group_device(group)
    send = torch.empty(sum(sizes[0]), dtype=torch.uint8, device=device)
    receive = torch.empty(sum(sizes[1]), dtype=torch.uint8, device=device)
    for move, segment in _segments(sides[0], send):
        values = holdings.values(move.held, move.copy.source_range)
        segment.view(values.shape).copy_(values)
    dist.all_to_all_single(receive, send, sizes[1], sizes[0], group=group)
    for move, segment in _segments(sides[1], receive):
        deliver(move.want, move.copy.destination_range, segment.view(extents(move.copy.source_range)))


def _segments(sides: list[list[_Move]], buffer: Tensor) -> Iterator[tuple[_Move, Tensor]]:
    """Yield each move with its flat part of the buffer, as the move's dtype."""
    position = 0
    for moves in sides:
        for move in moves:
            yield move, buffer[position : position + move.nbytes].view(move.dtype)
            position += _aligned(move.nbytes)
