"""The storage of an optimizer's moments: fp32, bf16, or 8 bits by blocks with dynamic quantisation.

A moment is seen as a matrix `[R, C]`, with one column if the parameter is a vector. The 8-bit form follows Dettmers
et al. 2022 (arXiv:2110.02861): a block of up to 256 elements of a row has an fp32 scale, its largest magnitude, and
each element the code of a level in [-1, 1] or (0, 1]. The levels of a decade are equidistant, and each smaller decade
has half the levels. Rows do not share blocks: copies of a row on several ranks stay equal.

bf16 and 8 bits are rounded stochastically: a moment changes by a thousandth at a step, which rounding to the nearest
number would lose. A second moment is never rounded to 0, by which AdamW would divide.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
_DECADES = 7
_TINY = torch.finfo(torch.float32).tiny

# The tensors that store one moment of a parameter; all have the rows of the parameter.
MomentTensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Storage(ABC):
    """A way to store one moment. Values are fp32 tensors `[R, C]`.

    Attributes:
        square: Whether the values are never negative.
        bits: The bits of an element.
        bytes_per_element: The memory of an element of a long row.
        exact: Whether values are stored without rounding.
    """

    square: bool
    bits: ClassVar[int]
    bytes_per_element: ClassVar[float]
    exact: ClassVar[bool] = False

    @abstractmethod
    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> MomentTensors:
        """Return tensors on "meta" like the parts of a moment; parts of zeros store zeros. `dtype` is the master's."""

    @abstractmethod
    def read(self, moment: MomentTensors) -> Tensor:
        """Return the values; a copy, or a view that may be written to."""

    @abstractmethod
    def write(self, moment: MomentTensors, values: Tensor, draw: Tensor | None = None) -> None:
        """Store values, rounded up with the chance `draw` / 2^16 (integers in `[0, 2^16)`); None: to the nearest."""


class Float32(Storage):
    """fp32, or fp64 for fp64 weights; exact."""

    bits, bytes_per_element, exact = 32, 4.0, True

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> MomentTensors:
        """See `Storage`."""
        return (torch.empty(rows, columns, dtype=dtype, device="meta"),)

    def read(self, moment: MomentTensors) -> Tensor:
        """See `Storage`."""
        return moment[0]

    def write(self, moment: MomentTensors, values: Tensor, draw: Tensor | None = None) -> None:
        """See `Storage`."""
        if values is not moment[0]:
            moment[0].copy_(values)


class BFloat16(Storage):
    """bf16."""

    bits, bytes_per_element = 16, 2.0

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> MomentTensors:
        """See `Storage`."""
        return (torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"),)

    def read(self, moment: MomentTensors) -> Tensor:
        """See `Storage`."""
        return moment[0].float()

    def write(self, moment: MomentTensors, values: Tensor, draw: Tensor | None = None) -> None:
        """See `Storage`."""
        if draw is not None:
            # bf16 is the upper half of fp32: a carry from the lower half rounds up.
            values = ((values.view(torch.int32) + draw.to(torch.int32)) & -0x10000).view(torch.float32)
        moment[0].copy_(values)


class Int8(Storage):
    """8 bits by blocks: codes `[R, C]` uint8, and scales `[R, blocks]` fp32."""

    bits, bytes_per_element = 8, 1 + 4 / BLOCK

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> MomentTensors:
        """See `Storage`."""
        codes = torch.empty(rows, columns, dtype=torch.uint8, device="meta")
        return codes, torch.empty(rows, -(-columns // BLOCK), dtype=torch.float32, device="meta")

    def read(self, moment: MomentTensors) -> Tensor:
        """See `Storage`."""
        codes, scales = moment
        table = levels(self.square).to(codes.device)
        return _joined(_blocks(table[codes.int()]) * scales[..., None], codes.shape[1])

    def write(self, moment: MomentTensors, values: Tensor, draw: Tensor | None = None) -> None:
        """See `Storage`."""
        codes, scales = moment
        table = levels(self.square).to(codes.device)
        blocks = _blocks(values)
        largest = blocks.abs().amax(-1)
        scales.copy_(largest)
        # A block of zeros has the scale 0.
        shares = _joined(blocks / largest.clamp(min=_TINY)[..., None], codes.shape[1])
        shares = torch.maximum(shares, table[0])
        lower = (torch.bucketize(shares, table, right=True) - 1).clamp(0, len(table) - 2)
        below, above = table[lower], table[lower + 1]
        chance = 0.5 if draw is None else (draw + 0.5) / 2**16
        codes.copy_(lower + ((shares - below) / (above - below) > chance))


def _blocks(values: Tensor) -> Tensor:
    """Return values `[R, C]` as blocks `[R, blocks, size]`, filled up with zeros; short rows have one block each."""
    size = min(BLOCK, values.shape[1])
    return F.pad(values, (0, -values.shape[1] % size)).view(len(values), -1, size)


def _joined(blocks: Tensor, columns: int) -> Tensor:
    return blocks.flatten(1)[:, :columns]


@functools.cache
def levels(square: bool) -> Tensor:
    """Return the 256 levels of 8-bit numbers, ascending: in [-1, 1], or for squares in (0, 1]."""
    count, numbers = (128, [1.0]) if square else (64, [1.0])
    for decade in range(_DECADES):
        steps = max(1, count >> decade)
        edges = torch.linspace(0.1, 1.0, steps + 1, dtype=torch.float64)
        numbers += ((edges[1:] + edges[:-1]) / 2 * 10.0**-decade).tolist()
    # Squares: one smaller level. Else 0 and all negative numbers but the smallest.
    numbers += [0.55 * 10.0**-_DECADES] if square else [0.0, *(-level for level in sorted(numbers)[1:])]
    return torch.tensor(sorted(numbers), dtype=torch.float32)


STORAGES: dict[str, type[Storage]] = {"float32": Float32, "bfloat16": BFloat16, "int8": Int8}
