"""Moving pieces between ranks: who holds a box sends it to who wants it, in buckets of bounded size.

Every rank derives the same list of moves from the layouts, so no move is negotiated. A bucket is one
`all_to_all_single` of bytes; a box larger than a bucket is cut along its leading dimensions. Extra memory: a send and a
receive buffer of at most `bucket_bytes` each, rounded up to the alignment.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.boxio import view_of
from ckpt.layout.pieces import Box, Copy, Piece, carried_over, extents, intersect, split_box
from ckpt.transfer.agreement import group_device
from ckpt.transfer.holdings import Holdings
from ckpt.transfer.owners import Held

BUCKET_BYTES = 64 << 20
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Want:
    """A piece that a rank wants: the rank, a name of its choice for the tensor, and the piece of it."""

    rank: int
    tensor: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class _Move:
    held: Held
    want: Want
    copy: Copy
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(extents(self.copy.source_range)) * self.dtype.itemsize


Deliver = Callable[[Want, Box, Tensor], None]


def exchange(
    holdings: Holdings,
    owners: dict[str, list[Held]],
    wants: Iterable[tuple[str, list[Want]]],
    group: ProcessGroup | None,
    deliver: Deliver,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[list[str]]:
    """Bring every wanted piece to its rank; collective over `group`, which must run it to the end on every rank.

    Args:
        holdings: from `take_stock`.
        owners: from `assign_owners`.
        wants: canonical name -> what the ranks want of it, in an order that is the same on every rank.
        group: the ranks; None: this process alone.
        deliver: called on the receiving rank with the want, the box of its tensor, and the values, which are valid only
            during the call; their extents equal the box's, apart from leading dimensions of 1.
        bucket_bytes: the most that one rank sends or receives at once (rounded up to 16 bytes).

    Yields:
        The names that are complete since the last time.
    """
    size = 1 if group is None else group.size()
    pending: list[_Move] = []
    sent, received = [0] * size, [0] * size
    done: list[str] = []

    def flush() -> None:
        _all_to_all(pending, holdings, group, deliver)
        pending.clear()
        sent[:], received[:] = [0] * size, [0] * size

    for name, wanted in wants:
        for move in _moves(owners[name], wanted, holdings.dtypes[name], bucket_bytes):
            nbytes = _aligned(move.nbytes)
            if max(sent[move.held.rank], received[move.want.rank]) + nbytes > bucket_bytes:
                flush()
                if done:
                    yield done
                    done = []
            pending.append(move)
            sent[move.held.rank] += nbytes
            received[move.want.rank] += nbytes
        done.append(name)
    flush()
    if done:
        yield done


def _moves(held: list[Held], wanted: list[Want], dtype: torch.dtype, bucket_bytes: int) -> Iterator[_Move]:
    for want in wanted:
        for holder in held:
            copy = intersect(holder.piece, want.piece)
            if copy is None:
                continue
            for part in split_box(copy.source_range, max(1, bucket_bytes // dtype.itemsize)):
                yield _Move(holder, want, Copy(part, carried_over(part, copy)), dtype)


def _values(move: _Move, holdings: Holdings) -> Tensor:
    return view_of(holdings.chunks[move.held.chunk].tensors[move.held.local], move.copy.source_range)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _all_to_all(moves: list[_Move], holdings: Holdings, group: ProcessGroup | None, deliver: Deliver) -> None:
    rank = holdings.rank
    for move in moves:
        if move.held.rank == move.want.rank == rank:
            deliver(move.want, move.copy.destination_range, _values(move, holdings))
    if group is None or group.size() == 1 or all(move.held.rank == move.want.rank for move in moves):
        return
    ranks = range(group.size())
    outgoing = [[move for move in moves if move.held.rank == rank != move.want.rank == peer] for peer in ranks]
    incoming = [[move for move in moves if move.want.rank == rank != move.held.rank == peer] for peer in ranks]
    sizes = [[sum(_aligned(move.nbytes) for move in peer) for peer in side] for side in (outgoing, incoming)]
    device = group_device(group)
    send = torch.empty(sum(sizes[0]), dtype=torch.uint8, device=device)
    receive = torch.empty(sum(sizes[1]), dtype=torch.uint8, device=device)
    for move, segment in _segments(outgoing, send):
        values = _values(move, holdings)
        segment.view(values.shape).copy_(values)
    dist.all_to_all_single(receive, send, sizes[1], sizes[0], group=group)
    for move, segment in _segments(incoming, receive):
        deliver(move.want, move.copy.destination_range, segment.view(extents(move.copy.source_range)))


def _segments(sides: list[list[_Move]], buffer: Tensor) -> Iterator[tuple[_Move, Tensor]]:
    """Each move's flat part of a buffer, as its own type."""
    position = 0
    for moves in sides:
        for move in moves:
            yield move, buffer[position : position + move.nbytes].view(move.dtype)
            position += _aligned(move.nbytes)


def copy_into(destination: Tensor, box: Box, values: Tensor) -> None:
    """Copy values into a box of a tensor, casting where the types differ; leading dimensions of 1 may be extra."""
    view = view_of(destination, box)
    view.copy_(values.reshape(view.shape))
