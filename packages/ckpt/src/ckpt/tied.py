"""Tied weights: a canonical tensor that several pipeline chunks hold must be the same on all of them when it is saved,
since a file holds it once."""

import ctypes
import zlib
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.agreement import agree, all_gather_json
from ckpt.boxio import StagingPool, view_of
from ckpt.holdings import Holdings
from ckpt.pieces import Box


def require_equal_copies(holdings: Holdings, group: ProcessGroup | None) -> None:
    """Refuse copies of tied weights that differ between pipeline chunks, or between replicas of them, in any bit.

    Communication: where there are such weights, one small JSON all-gather of a checksum for each piece.

    Raises:
        ValueError: names the tensor, the ranks and places of each version, and the fix; the same on every rank.
    """
    tied = _in_several_chunks(holdings)
    if not tied:
        return
    messages = all_gather_json(agree(lambda: _own_copies(holdings, tied), group), group)
    versions: dict[tuple[str, Box], dict[str, list[str]]] = {}
    for rank, message in enumerate(messages):
        for name, box, chunk, local, value in message:
            key = name, tuple((start, stop) for start, stop in box)  # JSON has made lists of them
            where = f"rank {rank} ({local} at {holdings.ranks[rank][chunk].place})"
            versions.setdefault(key, {}).setdefault(value, []).append(where)
    # Every rank has the same messages, so all of them raise or none does.
    for (name, box), found in versions.items():
        if len(found) > 1:
            listed = "; other values on ".join(_listed(wheres) for wheres in found.values())
            raise ValueError(
                f"{name} has copies that differ in {box}: {listed}. A file holds one: copy one to the others before "
                "saving, and in training all-reduce the gradients of tied weights over the stages that hold them"
            )


def _listed(wheres: list[str]) -> str:
    return ", ".join(wheres[:4]) + (f" and {len(wheres) - 4} more" if len(wheres) > 4 else "")


def _in_several_chunks(holdings: Holdings) -> set[str]:
    """The canonical tensors that more than one pipeline chunk holds."""
    places = {chunk.place for chunks in holdings.ranks for chunk in chunks}
    if len({place.chunk for place in places}) == 1:
        return set()
    first: dict[str, int] = {}
    tied = set()
    for place in places:
        for block in holdings.layout.at(place).values():
            for name in block.names:
                if first.setdefault(name, place.chunk) != place.chunk and name in holdings.dtypes:
                    tied.add(name)
    return tied


def _own_copies(holdings: Holdings, names: set[str]) -> list[Any]:
    """This rank's pieces of the named tensors: name, box, chunk, local name and checksum of each."""
    stagings = StagingPool()
    return [
        (piece.name, piece.canonical_range, index, local, _checksum(chunk.tensors[local], piece.local_range, stagings))
        for index, chunk in enumerate(holdings.chunks)
        for local, block in chunk.blocks.items()
        for piece in block.pieces
        if piece.name in names and not piece.is_padding
    ]


def _checksum(tensor: Tensor, box: Box, stagings: StagingPool) -> str:
    """The CRC-32 of a box's bytes, in row-major order."""
    staging = stagings.on(tensor.device)
    value = 0
    for part in staging.chunks(box, tensor.element_size()):
        view = view_of(tensor.detach(), part)
        buffer = staging.view(tuple(view.shape), view.dtype)
        buffer.copy_(view)
        nbytes = buffer.numel() * buffer.element_size()
        value = zlib.crc32((ctypes.c_char * nbytes).from_address(buffer.data_ptr()), value)
    return f"{value:08x}"
