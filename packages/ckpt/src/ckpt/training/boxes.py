"""The tensors of a training checkpoint: for each rank a safetensors file of boxes.

A box of the canonical tensor NAME has the key `NAME@` and the indices of its first element.
"""

from collections.abc import Iterable, Mapping
from contextlib import ContextDecorator
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from ckpt.files.header import read_header
from ckpt.files.written_files import FilePlan, create_files
from ckpt.layout.pieces import Piece, Shape, cover_problem, extents
from ckpt.transfer.agreement import agree
from ckpt.transfer.exchange import WantedPiece
from ckpt.transfer.holdings import HeldPiece, Holdings
from ckpt.transfer.tensor_files import TensorFiles
from ckpt.transfer.writing import reaching_ranks, write_pieces


def write_boxes(
    folder: Path,
    owners: Mapping[str, list[HeldPiece]],
    holdings: Holdings,
    group: ProcessGroup | None,
    room: ContextDecorator,
) -> list[str]:
    """Write and sync the file of each rank: by the rank itself, or by another rank where it does not reach the folder.

    Returns:
        The names of all files.

    Raises:
        ValueError: A weight is NaN or infinite; on every rank.
        OSError: The disk is full, or a file cannot be written; on every rank.
    """
    able = reaching_ranks(folder, group)
    pieces: list[tuple[HeldPiece, WantedPiece]] = []
    contents: dict[str, dict[str, tuple[torch.dtype, Shape]]] = {}
    files = {held.rank: f"rank-{held.rank:05d}.safetensors" for owned in owners.values() for held in owned}
    for name, owned in owners.items():
        for held in owned:
            box = held.piece.canonical_range or ()
            key = f"{name}@{','.join(str(start) for start, _ in box)}"
            writer = held.rank if held.rank in able else able[held.rank % len(able)]
            pieces.append((held, WantedPiece(frozenset((writer,)), key, Piece.of_box(name, box))))
            if writer == holdings.rank:
                contents.setdefault(files[held.rank], {})[key] = (holdings.dtypes[name], extents(box))
    plan = FilePlan(contents)
    agree(room(lambda: create_files(folder, plan)), group)
    write_pieces(folder, plan, pieces, holdings, group, room)
    agree(room(lambda: plan.complete(folder)), group)
    return sorted(files.values())


def open_boxes(folder: Path, files: Iterable[str]) -> TensorFiles:
    """Read the headers of a training checkpoint's files.

    Raises:
        ValueError: A file is missing or broken, or the key of a tensor names no box; names the file and the key.
    """
    opened = TensorFiles()
    for file in files:
        opened.headers[folder / file] = header = read_header(folder / file)
        for key, info in header.tensors.items():
            name, _, first = key.rpartition("@")
            starts = first.split(",") if first else []
            if len(starts) != len(info.shape) or 0 in info.shape or not all(map(str.isdecimal, starts)):
                raise ValueError(
                    f"{folder / file}: the key {key!r} of a tensor of shape {info.shape} names no box; restore the "
                    "folder from a copy, or load another step"
                )
            box = tuple((int(start), int(start) + size) for start, size in zip(starts, info.shape, strict=True))
            opened.tensors[key] = (folder / file, info)
            opened.pieces.setdefault(name, []).append((key, Piece.of_box(name, box)))
    return opened


def require_whole(stored: TensorFiles, shapes: Mapping[str, Shape], folder: Path) -> None:
    """Refuse a training checkpoint whose boxes do not cover each element of these tensors once; names the tensor."""
    for name, shape in shapes.items():
        boxes = sorted(piece.canonical_range or () for _, piece in stored.pieces.get(name, ()))
        if problem := cover_problem(boxes, shape):
            raise ValueError(
                f"{folder} is damaged or of another model: it does not hold each element of {name} {shape} once "
                f"({problem}); load the model that it was saved from, or an older step"
            )
