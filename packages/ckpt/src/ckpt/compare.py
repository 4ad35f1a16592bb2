"""Proof that two checkpoints, or a checkpoint and a live model, hold the same tensors."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.agreement import agree, all_gather_json
from ckpt.boxio import IOCounter, Staging, read_box, view_of
from ckpt.families import Role
from ckpt.layout import Layout
from ckpt.parts import on_this_rank
from ckpt.pieces import Block, Box, Copy, Piece, carried_over, extents, full_box, shared, split_box
from ckpt.place import Place
from ckpt.report import Difference, Kind, Report
from ckpt.shards import WEIGHTS
from ckpt.sources import Source, open_source
from ckpt.tally import Tally

_CPU = torch.device("cpu")
_CHUNK_ELEMENTS = 2 << 20


def verify(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    dtypes: bool = True,
    role: Role | None = None,
) -> Report:
    """Compare two checkpoints, each a Hugging Face folder or a sharded one, through bounded buffers.

    Args:
        a: the reference.
        b: the other.
        rtol: relative tolerance; with both tolerances 0 every bit must be the same.
        atol: absolute tolerance: |a - b| <= atol + rtol * |b|.
        dtypes: whether a different type is a difference; values are compared in any case.
        role: what Hugging Face folders are read as; None: what their heads and configs say that they are.

    Raises:
        ValueError: a checkpoint is broken or does not fit its own config. Differences are no error: see `Report.equal`.
    """
    first, second = open_source(a, role), open_source(b, role)
    report = Report()
    reader = _Reader()
    try:
        for name in dict.fromkeys((*first.layout.canonical, *second.layout.canonical)):
            held = [name in source.slots[WEIGHTS] for source in (first, second)]
            if not all(held):
                if any(held):
                    kind: Kind = "missing" if held[0] else "unexpected"
                    report.differences.append(Difference(name, kind, f"only in {a if held[0] else b}"))
                continue
            report.differences += _compare_canonical(name, first, second, reader, report, rtol, atol, dtypes)
    finally:
        reader.close()
    return report


def _compare_canonical(
    name: str, a: Source, b: Source, reader: "_Reader", report: Report, rtol: float, atol: float, dtypes: bool
) -> Iterator[Difference]:
    shapes = [source.layout.canonical[name].shape for source in (a, b)]
    if shapes[0] != shapes[1]:
        yield Difference(name, "shape", f"{list(shapes[0])} and {list(shapes[1])}")
        return
    types = [source.tensors[source.slots[WEIGHTS][name][0][0]][1].dtype for source in (a, b)]
    if dtypes and types[0] != types[1]:
        yield Difference(name, "dtype", f"{types[0]} and {types[1]}")
    block = Block.whole(name, shapes[0])
    report.tensors += 1
    report.elements += block.numel
    tally = Tally(atol, rtol)
    for box in split_box(block.pieces[0].local_range, _CHUNK_ELEMENTS) if block.numel else ():
        tally.add(reader.read(a, name, box, types[0]), reader.read(b, name, box, types[1]), box)
    difference = tally.difference(name)
    if difference is not None:
        yield difference


class _Reader:
    """Reads boxes of canonical tensors out of a source's files, keeping the last files open."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self._staging = Staging(_CPU)
        self._counter = IOCounter()

    def read(self, source: Source, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """The values of a box of a canonical tensor."""
        wanted = Block(extents(box), (Piece(name, box, full_box(extents(box))),))
        values = torch.empty(wanted.shape, dtype=dtype)
        for key, copy in shared(wanted, source.slots[WEIGHTS]):
            path, info = source.tensors[key]
            view = view_of(values, copy.destination_range)
            read_box(self._open(path), info, copy.source_range, view, self._staging, self._counter)
        return values

    def _open(self, path: Path) -> int:
        if path not in self._fds:
            if len(self._fds) >= 64:
                self.close()
            self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[path]

    def close(self) -> None:
        """Close all files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def verify_live(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    layout: Layout,
    place: Place | None = None,
    *,
    group: ProcessGroup | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    dtypes: bool = True,
) -> Report:
    """Compare a checkpoint with a live model: each rank its own tensors with the bytes that belong to them.

    Of DTensors, as FSDP2 makes them, a rank compares the part that it has. Differences are named by local tensor and
    counted in its elements; `first` is an index in what this rank has of it.

    Returns:
        One report of all ranks, the same on every rank.

    Raises:
        ValueError: the checkpoint is broken, or the tensors' names or shapes are not the layout's; on every rank.
    """

    def compare() -> Report:
        source = open_source(path, layout.role)
        where = Place() if place is None else place
        blocks = layout.at(where)
        report = Report()
        reader = _Reader()
        try:
            for name, block in blocks.items():
                held = all(canonical in source.slots[WEIGHTS] for canonical in block.names)
                if not held or name not in tensors:
                    if held or name in tensors:
                        kind: Kind = "missing" if held else "unexpected"
                        report.differences.append(Difference(name, kind, f"only in the {'files' if held else 'model'}"))
                    continue
                if tuple(tensors[name].shape) != block.shape:
                    shapes = f"{list(block.shape)} and {list(tensors[name].shape)}"
                    report.differences.append(Difference(name, "shape", shapes))
                    continue
                tensor, box = on_this_rank(name, tensors[name], block.shape)
                report.differences += _compare_local(
                    name, block.part(box), tensor, source, reader, report, rtol, atol, dtypes
                )
        finally:
            reader.close()
        report.differences += [
            Difference(name, "unexpected", "only in the model") for name in tensors if name not in blocks
        ]
        return report

    own = agree(compare, group)
    merged = Report()
    for other in map(Report.from_json, all_gather_json(own.to_json(), group)):
        merged.tensors += other.tensors
        merged.elements += other.elements
        merged.differences += other.differences
    return merged


def _compare_local(
    name: str,
    block: Block,
    tensor: Tensor,
    source: Source,
    reader: _Reader,
    report: Report,
    rtol: float,
    atol: float,
    dtypes: bool,
) -> Iterator[Difference]:
    if not block.names:
        return
    stored = source.tensors[source.slots[WEIGHTS][block.names[0]][0][0]][1].dtype
    if dtypes and stored != tensor.dtype:
        yield Difference(name, "dtype", f"{stored} and {tensor.dtype}")
    report.tensors += 1
    report.elements += block.numel
    tally = Tally(atol, rtol)
    for piece in block.pieces:
        if piece.canonical_range is None:
            held = view_of(tensor, piece.local_range).cpu()
            tally.add(torch.zeros_like(held), held, piece.local_range)
            continue
        copy = Copy(piece.canonical_range, piece.local_range)
        for part in split_box(piece.canonical_range, _CHUNK_ELEMENTS):
            at = carried_over(part, copy)
            values = reader.read(source, piece.name, part, stored)
            tally.add(values, view_of(tensor, at).cpu().reshape(values.shape), at)
    difference = tally.difference(name)
    if difference is not None:
        yield difference
