"""Check tied weights: a save or a move takes one of the copies that pipeline chunks hold, so all must be equal."""

import ctypes
import zlib
from collections.abc import Iterable

from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.boxio import Staging, view_of
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Box
from ckpt.layout.place import Place
from ckpt.transfer.agreement import agree, all_gather_json
from ckpt.transfer.holdings import Holdings

# A piece of a tied tensor: its name, its box, its place, and the checksum of its bytes.
_Copy = tuple[str, Box, str, str]


def tied_names(layout: Layout, places: Iterable[Place]) -> set[str]:
    """Return the canonical tensors that more than one pipeline chunk of these places holds."""
    first: dict[str, int] = {}
    tied = set()
    chunks = {place.chunk: place for place in places}
    for chunk, place in chunks.items() if len(chunks) > 1 else ():
        for block in layout.at(place).values():
            tied |= {name for name in block.names if first.setdefault(name, chunk) != chunk}
    return tied


def require_equal_copies(holdings: Holdings, layout: Layout, group: ProcessGroup | None) -> None:
    """Refuse copies of tied weights, and of their optimizer state, that differ in any bit between ranks.

    Communication: one small JSON all-gather of checksums, if there are tied weights.
    """
    tied = tied_names(layout, (chunk.place for chunks in holdings.ranks for chunk in chunks))
    # The name of optimizer state ends in the tensor's name.
    names = {name for name in holdings.shapes if name.rpartition("/")[2] in tied}
    if not names:
        return
    versions: dict[tuple[str, Box], dict[str, list[str]]] = {}
    for rank, message in enumerate(all_gather_json(agree(lambda: _local_copies(holdings, names), group), group)):
        for name, box, where, value in message:
            key = name, tuple((start, stop) for start, stop in box)  # JSON has made lists of them
            versions.setdefault(key, {}).setdefault(value, []).append(f"rank {rank} ({where})")
    for (name, box), holders in versions.items():
        if len(holders) > 1:
            listed = "; other values on ".join(
                ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")
                for places in holders.values()
            )
            raise ValueError(
                f"{name} has copies that differ in {box}: {listed}. One of them would be taken: copy one to the others "
                "first, and in training all-reduce the gradients of tied weights over the stages that hold them"
            )


def _local_copies(holdings: Holdings, names: set[str]) -> list[_Copy]:
    """Return this rank's pieces of the named tensors, with their checksums."""
    staging = Staging()
    return [
        (
            piece.name,
            piece.canonical_range,
            f"{local} at {chunk.place}",
            _checksum(chunk.tensors[local], piece.local_range, staging),
        )
        for chunk in holdings.chunks
        for local, block in chunk.blocks.items()
        for piece in block.pieces
        if piece.name in names and piece.canonical_range is not None
    ]


def _checksum(tensor: Tensor, box: Box, staging: Staging) -> str:
    """Return the CRC-32 of a box's bytes, in row-major order."""
    value = 0
    for chunk in staging.chunks(box, tensor.element_size()):
        view = view_of(tensor.detach(), chunk)
        buffer = staging.view(tuple(view.shape), view.dtype, view.device)
        buffer.copy_(view)
        nbytes = buffer.numel() * buffer.element_size()
        value = zlib.crc32((ctypes.c_char * nbytes).from_address(buffer.data_ptr()), value)
    return f"{value:08x}"
