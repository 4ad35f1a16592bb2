"""Proof that two checkpoints, or a checkpoint and a live model, hold the same tensors."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.agreement import agree, all_gather_json
from ckpt.boxio import IOCounter, Staging, read_box, view_of
from ckpt.families import Role
from ckpt.layout import Layout
from ckpt.pieces import Block, Box, Copy, Piece, carried_over, extents, full_box, shared, split_box
from ckpt.place import Place
from ckpt.shards import WEIGHTS
from ckpt.sources import Source, open_source

Kind = Literal["missing", "unexpected", "shape", "dtype", "values"]
_CPU = torch.device("cpu")
_CHUNK_ELEMENTS = 2 << 20


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same.

    Attributes:
        name: the canonical tensor, or the local one of a live model.
        kind: "missing": only the first has it; "unexpected": only the second has it; "shape"; "dtype"; "values".
        detail: the two sides, for people.
        elements: how many elements differ by more than the tolerance.
        worst: the largest absolute difference; infinite where one side is not a number.
        first: the index of the first element that differs.
    """

    name: str
    kind: Kind
    detail: str
    elements: int = 0
    worst: float = 0.0
    first: tuple[int, ...] = ()


@dataclass
class Report:
    """What a comparison found.

    Attributes:
        tensors: how many were compared.
        elements: of how many elements.
        differences: in the model's order.
    """

    tensors: int = 0
    elements: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference in the model's order."""
        return self.differences[0] if self.differences else None

    @property
    def worst(self) -> Difference | None:
        """The difference with the largest absolute value."""
        return max(self.differences, key=lambda difference: difference.worst, default=None)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "equal": self.equal,
            "tensors": self.tensors,
            "elements": self.elements,
            # JSON has no infinity: null stands for it.
            "differences": [
                {
                    **dataclasses.asdict(difference),
                    "worst": difference.worst if math.isfinite(difference.worst) else None,
                }
                for difference in self.differences
            ],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Report":
        """The report that `to_json` described."""
        differences = [
            Difference(**{**entry, "first": tuple(entry["first"]), "worst": _or_infinite(entry["worst"])})
            for entry in value["differences"]
        ]
        return cls(value["tensors"], value["elements"], differences)


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


@dataclass
class _Tally:
    """Running comparison of one tensor, chunk by chunk."""

    atol: float
    rtol: float
    elements: int = 0
    worst: float = 0.0
    first: tuple[int, ...] = ()

    def add(self, a: Tensor, b: Tensor, at: Box) -> None:
        """Compare two chunks; `at` is where they lie in their tensor."""
        if self.atol == self.rtol == 0 and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
            return
        exact = _bits(a) != _bits(b) if a.dtype == b.dtype else a.double() != b.double()
        a, b = a.double(), b.double()
        gap = (a - b).abs()
        close = gap <= self.atol + self.rtol * b.abs()
        both_nan = a.isnan() & b.isnan()
        differs = exact if self.atol == self.rtol == 0 else ~(close | both_nan | (a == b))
        count = int(differs.sum())
        if not count:
            return
        if not self.elements:
            index = torch.nonzero(differs.reshape(a.shape))[0].tolist()
            self.first = tuple(
                start + offset for (start, _), offset in zip(at[len(at) - len(index) :], index, strict=True)
            )
        self.elements += count
        gaps = gap[differs].nan_to_num(nan=float("inf"))
        self.worst = max(self.worst, float(gaps.max()))

    def difference(self, name: str) -> Difference | None:
        """The difference found, if any."""
        if not self.elements:
            return None
        detail = f"{self.elements} elements differ, first at {list(self.first)}, by at most {self.worst:.6g}"
        return Difference(name, "values", detail, self.elements, self.worst, self.first)


def _bits(tensor: Tensor) -> Tensor:
    """The elements' bits as integers, so that NaN equals itself and -0.0 is not 0.0."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()])


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
        role: what Hugging Face folders are read as; None: a value model where there is a value head.

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
    tally = _Tally(atol, rtol)
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

    Differences are named by local tensor and counted in its elements; `first` is an index in the local tensor.

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
                report.differences += _compare_local(
                    name, block, tensors[name].detach(), source, reader, report, rtol, atol, dtypes
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
    if tuple(tensor.shape) != block.shape:
        yield Difference(name, "shape", f"{list(block.shape)} and {list(tensor.shape)}")
        return
    stored = source.tensors[source.slots[WEIGHTS][block.names[0]][0][0]][1].dtype
    if dtypes and stored != tensor.dtype:
        yield Difference(name, "dtype", f"{stored} and {tensor.dtype}")
    report.tensors += 1
    report.elements += block.numel
    tally = _Tally(atol, rtol)
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
