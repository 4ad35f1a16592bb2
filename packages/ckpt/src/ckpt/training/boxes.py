"""The tensors of a training checkpoint: for each rank a safetensors file of boxes, and `metadata.json` for all files.

A box of the canonical tensor NAME has the key `NAME@` and the indices of its first element.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ckpt.files.boxio import IOCounter
from ckpt.files.contents import METADATA
from ckpt.files.disk import room_for
from ckpt.files.dtypes import DTYPES, dtype_name
from ckpt.files.header import Header, read_header
from ckpt.files.written_files import FilePlan, create_files, write_json
from ckpt.layout.config import read_json_file
from ckpt.layout.pieces import Box, Piece, Shape, extents, full_box
from ckpt.transfer.agreement import agree, all_gather_json
from ckpt.transfer.exchange import Want
from ckpt.transfer.holdings import Held, Holdings
from ckpt.transfer.writing import write_pieces


@dataclass(frozen=True)
class Stored:
    """A tensor of a training checkpoint.

    Attributes:
        dtype: The dtype.
        shape: The full shape.
        chunks: Key -> (file name, the box of the tensor that it holds).
    """

    dtype: torch.dtype
    shape: Shape
    chunks: dict[str, tuple[str, Box]]

    @property
    def pieces(self) -> list[tuple[str, Piece]]:
        """The tensors of the files, as pieces: [(key, piece)]."""
        return [(key, _piece(key.rpartition("@")[0], box)) for key, (_, box) in self.chunks.items()]


def _piece(name: str, box: Box) -> Piece:
    return Piece(name, box, full_box(extents(box)))


def _key(name: str, box: Box) -> str:
    return f"{name}@{','.join(str(start) for start, _ in box)}"


def planned(owners: Mapping[str, list[Held]], holdings: Holdings) -> dict[str, Stored]:
    """Return the tensors of a checkpoint in which each rank has a file of the pieces that it owns."""
    tensors = {}
    for name, owned in owners.items():
        boxes = [(f"rank-{held.rank:05d}.safetensors", held.piece.canonical_range or ()) for held in owned]
        chunks = {_key(name, box): (file, box) for file, box in boxes}
        if chunks:
            tensors[name] = Stored(holdings.dtypes[name], holdings.shapes[name], chunks)
    return tensors


def write_boxes(
    folder: Path,
    tensors: Mapping[str, Stored],
    owners: Mapping[str, list[Held]],
    holdings: Holdings,
    group: ProcessGroup | None,
    counter: IOCounter,
) -> None:
    """Write and sync the file of each rank: by the rank itself, or by another rank where it does not reach the folder.

    Raises:
        OSError: The disk is full, or a file cannot be written; on every rank.
    """
    reach = all_gather_json(_reaches(folder), group)
    writers = [rank for rank, can in enumerate(reach) if can]
    writer_of = [rank if can else writers[rank % len(writers)] for rank, can in enumerate(reach)]
    pieces: list[tuple[Held, Want]] = []
    contents: dict[str, dict[str, tuple[torch.dtype, Shape]]] = {}
    for name, stored in tensors.items():
        for held, (key, (file, box)) in zip(owners[name], stored.chunks.items(), strict=True):
            writer = writer_of[held.rank]
            pieces.append((held, Want(frozenset((writer,)), key, _piece(name, box))))
            if writer == holdings.rank:
                contents.setdefault(file, {})[key] = (stored.dtype, extents(box))
    plan = FilePlan(contents)
    room = room_for(holdings.nbytes, folder.parent)
    agree(room(lambda: create_files(folder, plan)), group)
    write_pieces(folder, plan, pieces, holdings, group, counter, holdings.nbytes)
    agree(room(lambda: plan.complete(folder)), group)


def _reaches(folder: Path) -> bool:
    """Return whether this rank sees a folder that another rank has just created, and may write in it."""
    return os.access(folder, os.W_OK | os.X_OK)


def write_metadata(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """Write `metadata.json`."""
    entries: dict[str, Any] = {}
    for name, stored in tensors.items():
        chunks = [
            {"offsets": [start for start, _ in box], "sizes": extents(box), "file": file, "key": key}
            for key, (file, box) in stored.chunks.items()
        ]
        entries[name] = {"dtype": dtype_name(stored.dtype), "shape": stored.shape, "chunks": chunks}
    write_json(folder / METADATA, entries)


def read_metadata(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a checkpoint folder by name.

    Raises:
        ValueError: `metadata.json` is missing or malformed; names the entry.
    """
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(f"{path} does not exist; pass a folder that save_training has written")
    tensors = {}
    try:
        for name, entry in read_json_file(path).items():
            shape, chunks = entry["shape"], {}
            for chunk in entry["chunks"]:
                offsets, sizes = chunk["offsets"], chunk["sizes"]
                if not _fits(offsets, sizes, shape):
                    raise ValueError(f"{path}: a chunk of {name} is not within its shape: {chunk!r:.200}")
                if Path(chunk["file"]).name != chunk["file"]:
                    raise ValueError(f"{path} names the file {chunk['file']!r}, outside the folder")
                box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
                key = _key(name, box)
                if key in chunks or chunk["key"] != key:
                    raise ValueError(
                        f"{path}: a chunk of {name} has the key {chunk['key']!r}; it must be {key!r}, once"
                    )
                chunks[key] = (chunk["file"], box)
            tensors[name] = Stored(DTYPES[entry["dtype"]], tuple(shape), chunks)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is malformed: {error!r}") from None
    return tensors


def _fits(offsets: Any, sizes: Any, shape: Any) -> bool:
    """Return whether a chunk's entries are lists of numbers, and the chunk is within the shape and not empty."""
    lists = (offsets, sizes, shape)
    if any(not isinstance(held, list) or any(type(number) is not int for number in held) for held in lists):
        return False
    return len(offsets) == len(sizes) == len(shape) and all(
        0 <= start < start + length <= total < 1 << 62
        for start, length, total in zip(offsets, sizes, shape, strict=True)
    )


def check_headers(folder: Path, tensors: Mapping[str, Stored], rank: int, size: int) -> dict[Path, Header]:
    """Compare `metadata.json` with the headers of this rank's share of the files; `size` ranks divide the files.

    Returns:
        The headers of the share.

    Raises:
        ValueError: A file is missing or broken, or its tensors differ from `metadata.json`; names the first.
    """
    said: dict[str, dict[str, tuple[torch.dtype, Shape]]] = {
        path.name: {} for path in folder.glob("rank-*.safetensors")
    }
    for stored in tensors.values():
        for key, (file, box) in stored.chunks.items():
            said.setdefault(file, {})[key] = (stored.dtype, extents(box))
    headers = {}
    for file in sorted(said)[rank::size]:
        headers[folder / file] = header = read_header(folder / file)
        held = {key: (info.dtype, info.shape) for key, info in header.tensors.items()}
        odd = next((key for key in {**held, **said[file]} if held.get(key) != said[file].get(key)), None)
        if odd is not None:
            there, here = (f"{known[odd]}" if odd in known else "nothing" for known in (held, said[file]))
            raise ValueError(
                f"{folder / file} and {METADATA} disagree about {odd!r}: the file holds {there}, {METADATA} says "
                f"{here}; one of the two is damaged: restore the folder from a copy, or load another step"
            )
    return headers
