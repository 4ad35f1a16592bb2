"""Compare the tensors of two checkpoints, or of a checkpoint and a live model."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.comparison.config_fields import config_differences
from ckpt.comparison.report import Difference, Kind, Report
from ckpt.files.boxio import IOCounter, Staging, read_box, view_of
from ckpt.files.disk import while_unchanged
from ckpt.layout.dtensors import on_this_rank
from ckpt.layout.families import Role
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Block, Box, Copy, Piece, carried_over, extents, full_box, shared, split_box, volume
from ckpt.layout.place import Place
from ckpt.transfer.agreement import agree, all_gather_json
from ckpt.transfer.sources import Source, open_source, open_with_prediction_layers

_CHUNK_ELEMENTS = 2 << 20
_MOST_FILES = 128  # open at a time


def verify(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    dtypes: bool = True,
    role: Role | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Compare two checkpoints, each a Hugging Face folder or a sharded one, through bounded buffers.

    In sharded checkpoints every rank's copy is compared. The tensors of multi-token-prediction layers, which loads
    skip, are compared, too: a checkpoint without them differs. Fields of config.json that change the outputs of the
    same tensors (`rope_theta`, `rms_norm_eps`) are compared as well.

    Args:
        a: The reference.
        b: The other checkpoint.
        rtol: Relative tolerance; with both tolerances 0 every bit must be the same.
        atol: Absolute tolerance: |a - b| <= atol + rtol * |b|.
        dtypes: Whether different dtypes are a difference; values are compared in any case.
        role: The role of Hugging Face folders; None: a value model where there is a value head.
        progress: Called with the bytes compared so far and the bytes in all.

    Raises:
        ValueError: A checkpoint is broken, does not fit its own config or was replaced meanwhile. Differences are not
            errors: see `Report.equal`.
    """
    first, second = (open_with_prediction_layers(path, role) for path in (a, b))
    report = Report(differences=config_differences(first.layout.config, second.layout.config))
    with while_unchanged(first.files | second.files), _Comparison(report, rtol, atol, dtypes) as comparison:
        if progress is not None:
            comparison.show(progress, _bytes_to_compare(first, second))
        for name in dict.fromkeys((*first.layout.canonical, *second.layout.canonical)):
            held = [name in source.pieces for source in (first, second)]
            if all(held):
                report.differences += comparison.canonical(name, first, second)
            elif any(held):
                kind: Kind = "missing" if held[0] else "unexpected"
                report.differences.append(Difference(name, kind, f"only in {a if held[0] else b}"))
    return report


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
    """Compare a checkpoint with a live model: each rank compares its own tensors with their bytes in the files.

    A rank compares its own part of a DTensor. A `Difference` names the local tensor and counts its elements; `first` is
    an index in this rank's part. The configurations compared are the checkpoint's and the layout's.

    Returns:
        One report of all ranks, the same on every rank.

    Raises:
        ValueError: The checkpoint is broken or was replaced meanwhile, or the tensors' names or shapes are not the
            layout's; on every rank.
    """

    def compare() -> Report:
        source = open_source(path, layout.role)
        blocks = layout.at(Place() if place is None else place)
        report = Report()
        if group is None or group.rank() == 0:
            report.differences += config_differences(source.layout.config, layout.config)
        with while_unchanged(source.files), _Comparison(report, rtol, atol, dtypes) as comparison:
            for name in dict.fromkeys((*blocks, *tensors)):
                block, tensor = blocks.get(name), tensors.get(name)
                stored = block is not None and all(canonical in source.pieces for canonical in block.names)
                if block is None or not stored or tensor is None:
                    if stored or tensor is not None:
                        kind: Kind = "missing" if stored else "unexpected"
                        detail = f"only in the {'files' if stored else 'model'}"
                        report.differences.append(Difference(name, kind, detail))
                elif tuple(tensor.shape) != block.shape:
                    shapes = f"{list(block.shape)} and {list(tensor.shape)}"
                    report.differences.append(Difference(name, "shape", shapes))
                else:
                    own, box = on_this_rank(name, tensor, block.shape)
                    report.differences += comparison.local(name, block.part(box), own, source)
        return report

    own = agree(compare, group)
    merged = Report()
    for other in all_gather_json(dataclasses.asdict(own), group):
        merged.tensors += other["tensors"]
        merged.elements += other["elements"]
        merged.differences += [
            Difference(**{**entry, "first": tuple(entry["first"])}) for entry in other["differences"]
        ]
    return merged


def refuse_differing_copies(source: Source) -> None:
    """Refuse files in which the copies of tied weights differ between pipeline chunks."""
    with while_unchanged(source.files), _Comparison(Report(), 0.0, 0.0, True) as comparison:
        for name in source.copies.keys() & source.tied:
            for difference in comparison.copies(name, source):
                raise ValueError(
                    f"{name} has copies that differ, of which one would be taken: {difference.detail}; "
                    f"{source.tensors[source.pieces[name][0][0]][0]} has the other. Make them equal, and in "
                    "training all-reduce the gradients of tied weights over the stages that hold them"
                )


def _bytes_to_compare(a: Source, b: Source) -> int:
    """Return the bytes to compare: those of the reference's tensors, and those of all copies."""
    total = 0
    for name in a.pieces.keys() & b.pieces.keys():
        shapes = [source.layout.canonical[name].shape for source in (a, b)]
        if shapes[0] == shapes[1]:
            for source, elements in ((a, math.prod(shapes[0])), (b, 0)):
                copied = sum(volume(piece.local_range) for _, piece in source.copies.get(name, ()))
                total += (elements + copied) * source.tensors[source.pieces[name][0][0]][1].dtype.itemsize
    return total


# A checkpoint, the tensors in it that hold a canonical tensor, and the dtype of the values read.
_Side = tuple[Source, list[tuple[str, Piece]], torch.dtype]


def _side(source: Source, parts: list[tuple[str, Piece]]) -> _Side:
    return source, parts, source.tensors[parts[0][0]][1].dtype


class _Comparison:
    """Compares tensors through open files, and counts the tensors and elements in a report."""

    def __init__(self, report: Report, rtol: float, atol: float, dtypes: bool) -> None:
        self.report, self.rtol, self.atol, self.dtypes = report, rtol, atol, dtypes
        self._progress: Callable[[int, int], None] = lambda done, total: None
        self._done = self._total = 0
        self._fds: dict[Path, int] = {}
        self._values, self._staging = (Staging(), Staging()), Staging()

    def show(self, progress: Callable[[int, int], None], total: int) -> None:
        """Call `progress` from now on, with the bytes done and the bytes in all."""
        self._progress, self._total = progress, total

    def __enter__(self) -> "_Comparison":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def canonical(self, name: str, a: Source, b: Source) -> Iterator[Difference]:
        """Yield the differences between two checkpoints' tensors of one name, and between copies in each of them."""
        shapes = [source.layout.canonical[name].shape for source in (a, b)]
        if shapes[0] != shapes[1]:
            yield Difference(name, "shape", f"{list(shapes[0])} and {list(shapes[1])}")
            return
        sides = [_side(source, source.pieces[name]) for source in (a, b)]
        if self.dtypes and sides[0][2] != sides[1][2]:
            yield Difference(name, "dtype", f"{sides[0][2]} and {sides[1][2]}")
        whole = full_box(shapes[0])
        self.report.tensors += 1
        self.report.elements += volume(whole)
        yield from self._boxes(name, whole, *sides)
        for source in (a, b):
            yield from self.copies(name, source)

    def copies(self, name: str, source: Source) -> Iterator[Difference]:
        """Yield the differences between a checkpoint's tensor and further ranks' copies of the tensor."""
        reference = _side(source, source.pieces[name])
        for key, piece in source.copies.get(name, ()):
            assert piece.canonical_range is not None
            for difference in self._boxes(name, piece.canonical_range, reference, _side(source, [(key, piece)])):
                detail = f"{source.tensors[key][0]} holds another copy: {difference.detail}"
                yield dataclasses.replace(difference, detail=detail)

    def _boxes(self, name: str, box: Box, a: _Side, b: _Side) -> Iterator[Difference]:
        tally = _Tally(self.atol, self.rtol)
        for part in split_box(box, _CHUNK_ELEMENTS) if volume(box) else ():
            tally.add(self._read(0, a, name, part), self._read(1, b, name, part), part)
            self._done += volume(part) * a[2].itemsize
            self._progress(self._done, self._total)
        yield from tally.differences(name)

    def local(self, name: str, block: Block, tensor: Tensor, source: Source) -> Iterator[Difference]:
        """Yield the differences between a checkpoint and a live model's tensor, or a rank's part of the tensor."""
        if not block.names:
            return
        stored = _side(source, source.pieces[block.names[0]])[2]
        if self.dtypes and stored != tensor.dtype:
            yield Difference(name, "dtype", f"{stored} and {tensor.dtype}")
        self.report.tensors += 1
        self.report.elements += block.numel
        tally = _Tally(self.atol, self.rtol)
        for piece in block.pieces:
            if piece.canonical_range is None:
                held = view_of(tensor, piece.local_range).cpu()
                tally.add(torch.zeros_like(held), held, piece.local_range)
                continue
            copy = Copy(piece.canonical_range, piece.local_range)
            side = (source, source.pieces[piece.name], stored)
            for part in split_box(piece.canonical_range, _CHUNK_ELEMENTS):
                at = carried_over(part, copy)
                values = self._read(0, side, piece.name, part)
                tally.add(values, view_of(tensor, at).cpu().reshape(values.shape), at)
        yield from tally.differences(name)

    def _read(self, buffer: int, side: _Side, name: str, box: Box) -> Tensor:
        """Return the values of a box of a canonical tensor; valid until the next call with this buffer."""
        source, parts, dtype = side
        wanted = Block(extents(box), (Piece(name, box, full_box(extents(box))),))
        values = self._values[buffer].view(wanted.shape, dtype)
        for key, copy in shared(wanted, {name: parts}):
            path, info = source.tensors[key]
            if path not in self._fds:
                if len(self._fds) >= _MOST_FILES:
                    self.__exit__()
                self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            view = view_of(values, copy.destination_range)
            read_box(self._fds[path], info, copy.source_range, view, self._staging, IOCounter())
        return values


@dataclass
class _Tally:
    """Running comparison of one tensor, chunk by chunk."""

    atol: float
    rtol: float
    elements: int = 0
    worst: float = 0.0
    first: tuple[int, ...] = ()

    def add(self, a: Tensor, b: Tensor, at: Box) -> None:
        """Compare two chunks; `at` is their box in the tensor."""
        exact, same_type = self.atol == self.rtol == 0, a.dtype == b.dtype
        if exact and same_type and torch.equal(_bits(a), _bits(b)):
            return
        gap = (a.double() - b.double()).abs()
        if exact:
            differs = _bits(a) != _bits(b) if same_type else a.double() != b.double()
        else:
            differs = ~torch.isclose(a.double(), b.double(), self.rtol, self.atol, equal_nan=True)
        if not differs.any():
            return
        if not self.elements:
            index = torch.nonzero(differs.reshape(a.shape))[0].tolist()
            starts = [start for start, _ in at[len(at) - len(index) :]]
            self.first = tuple(start + offset for start, offset in zip(starts, index, strict=True))
        self.elements += int(differs.sum())
        self.worst = max(self.worst, float(gap[differs].nan_to_num(nan=float("inf")).max()))

    def differences(self, name: str) -> Iterator[Difference]:
        """Yield the difference of all chunks, if there is one."""
        if self.elements:
            detail = f"{self.elements} elements differ, first at {list(self.first)}, by at most {self.worst:.6g}"
            yield Difference(name, "values", detail, self.elements, self.worst, self.first)


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements' bits as integers, so that NaN equals itself and -0.0 is not 0.0."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()])
