"""Compare the tensors of two checkpoints, element by element."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt.comparison.config_fields import adapter_differences, config_differences
from ckpt.comparison.report import Difference, Kind, Report
from ckpt.files.contents import is_adapter
from ckpt.files.disk import while_unchanged
from ckpt.layout.pieces import Box, full_box, split_box, volume
from ckpt.transfer.adapters import adapter_source
from ckpt.transfer.sources import open_source
from ckpt.transfer.tensor_files import Source

_CHUNK_ELEMENTS = 2 << 20


def verify(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    dtypes: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Compare two checkpoints, each a Hugging Face or a sharded folder, through bounded buffers; or two adapters.

    In sharded checkpoints every rank's copy is compared. The tensors of multi-token-prediction layers, which loads
    skip, are compared, too: a checkpoint without them differs. Fields of config.json that change the outputs of the
    same tensors (`rope_theta`, `rms_norm_eps`) are compared as well.

    Args:
        a: The reference.
        b: The other checkpoint.
        rtol: Relative tolerance; with both tolerances 0 every bit must be the same.
        atol: Absolute tolerance: |a - b| <= atol + rtol * |b|.
        dtypes: Whether different dtypes are a difference; values are compared in any case.
        progress: Called with the bytes of the reference compared so far and in all.

    Raises:
        ValueError: A checkpoint is broken, does not fit its own config or was replaced meanwhile. Differences are not
            errors: see `Report.equal`.
    """
    adapters = [is_adapter(path) for path in (a, b)]
    if any(adapters) and not all(adapters):
        raise ValueError(f"{a if adapters[0] else b} is a LoRA adapter, and the other is none; merge it first")
    first, second = ((adapter_source if all(adapters) else open_source)(path) for path in (a, b))
    sizes = {
        name: math.prod(first.layout.canonical[name].shape) * first.stored_dtype(name).itemsize for name in first.pieces
    }
    done = 0
    differences = adapter_differences if all(adapters) else config_differences
    report = Report(differences=differences(first.layout.config, second.layout.config))
    comparison = _Comparison(report, rtol, atol, dtypes)
    with while_unchanged(first.files | second.files):
        for name in dict.fromkeys((*first.layout.canonical, *second.layout.canonical)):
            held = [name in source.pieces for source in (first, second)]
            if all(held):
                report.differences += comparison.canonical(name, first, second)
            elif any(held):
                kind: Kind = "missing" if held[0] else "unexpected"
                report.differences.append(Difference(name, kind, f"only in {a if held[0] else b}"))
            done += sizes.get(name, 0)
            if progress is not None:
                progress(done, sum(sizes.values()))
    return report


def refuse_differing_copies(source: Source) -> None:
    """Refuse files in which the copies of tied weights differ between pipeline chunks."""
    with while_unchanged(source.files):
        for name in source.copies.keys() & source.tied:
            for difference in _Comparison(Report()).copies(name, source):
                raise ValueError(
                    f"{name} has copies that differ, and a load takes only one: {difference.detail}; the other is in "
                    f"{source.tensors[source.pieces[name][0][0]][0]}. Make the copies equal, and in "
                    "training all-reduce the gradients of tied weights over the stages that hold them"
                )


@dataclass
class _Comparison:
    """Compares tensors, and counts the tensors and elements in a report."""

    report: Report
    rtol: float = 0.0
    atol: float = 0.0
    dtypes: bool = True

    def canonical(self, name: str, a: Source, b: Source) -> Iterator[Difference]:
        """Yield the differences between two checkpoints' tensors of one name, and between copies in each of them."""
        shapes = [source.layout.canonical[name].shape for source in (a, b)]
        if shapes[0] != shapes[1]:
            yield Difference(name, "shape", f"{list(shapes[0])} and {list(shapes[1])}")
            return
        if (name in a.layout.transposed) != (name in b.layout.transposed):
            yield Difference(name, "shape", "the files have its last two dimensions in different orders")
        dtypes = [source.stored_dtype(name) for source in (a, b)]
        if self.dtypes and dtypes[0] != dtypes[1]:
            yield Difference(name, "dtype", f"{dtypes[0]} and {dtypes[1]}")
        whole = full_box(shapes[0])
        self.report.tensors += 1
        self.report.elements += volume(whole)
        yield from self._boxes(name, whole, a, b)
        for source in (a, b):
            yield from self.copies(name, source)

    def copies(self, name: str, source: Source) -> Iterator[Difference]:
        """Yield the differences between a checkpoint's tensor and further ranks' copies of the tensor."""
        for key, piece in source.copies.get(name, ()):
            assert piece.canonical_range is not None
            copy = dataclasses.replace(source, pieces={name: [(key, piece)]})
            for difference in self._boxes(name, piece.canonical_range, source, copy):
                detail = f"{source.tensors[key][0]} holds another copy: {difference.detail}"
                yield dataclasses.replace(difference, detail=detail)

    def _boxes(self, name: str, box: Box, a: Source, b: Source) -> Iterator[Difference]:
        tally = _Tally(self.atol, self.rtol)
        for chunk in split_box(box, _CHUNK_ELEMENTS) if volume(box) else ():
            first, second = (source.values(name, chunk, source.stored_dtype(name)) for source in (a, b))
            tally.add(first, second, chunk)
        yield from tally.differences(name)


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
