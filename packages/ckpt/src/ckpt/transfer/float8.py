"""Load projections as FP8 numbers and scales by blocks, without making dense values of them.

A checkpoint in block FP8 (`ckpt.files.block_fp8`) gives its numbers and scales; plain weights are quantized on the way.
Both give the same values on every grid: block boundaries follow the unsharded tensor. A rank's part may cut blocks, so
its scales are for smaller blocks, whose sides divide everything (`float8_sides`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckpt.files.block_fp8 import BLOCK, SCALE, is_quantized, quantize
from ckpt.files.boxio import Staging, part_of, read_box, view_of
from ckpt.files.mirror import open_weights
from ckpt.files.quantized import Quantized
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Block, Box, extents, shared
from ckpt.layout.place import Place
from ckpt.transfer.parallel_reads import BATCH_BYTES, Read
from ckpt.transfer.tensor_files import Source


def float8_sides(layout: Layout, places: Sequence[Place]) -> dict[str, tuple[int, int]]:
    """Return the local weights that may stay in FP8, the projections, and the rows and columns of their blocks."""
    sides: dict[str, tuple[int, int]] = {}
    for place in places:
        for local, block in layout.at(place).items():
            if block.names and all(is_quantized(name, layout.canonical[name].shape) for name in block.names):
                rows, columns = (_side(block, dim) for dim in (-2, -1))
                sides[local] = rows, columns
    return sides


def _side(block: Block, dim: int) -> int:
    """Return the side of blocks that begin and end with pieces, here and in the whole tensors."""
    edges = [edge for piece in block.pieces for edge in piece.local_range[dim]]
    edges += [piece.canonical_range[dim][0] for piece in block.pieces if piece.canonical_range is not None]
    return math.gcd(BLOCK, *edges)


def require_float8(source: Source, names: Sequence[str]) -> None:
    """Raise ValueError unless canonical tensors can be loaded as FP8 by blocks."""
    if source.grid is not None:
        raise ValueError("a sharded checkpoint cannot be loaded in FP8; `ckpt merge` makes a Hugging Face folder of it")
    for name in names:
        _, info = source.tensors[source.pieces[name][0][0]]
        if isinstance(info, Quantized) and (info.method != "fp8" or any(side % BLOCK for side in _whole(info))):
            raise ValueError(
                f"{name} is in {info.method} by blocks of {info.block}, and weights stay in FP8 by blocks of {BLOCK} x "
                f"{BLOCK} alone; make plain weights with `ckpt merge`, or load the values"
            )


def _whole(info: Quantized) -> list[int]:
    """Return the sides of blocks that end before the tensor does."""
    return [side for side, size in zip(info.block, info.shape, strict=True) if side < size]


@dataclass(frozen=True, slots=True)
class Float8Read(Read):
    """A box of a projection, its numbers, and `scales`, the view of its blocks' scales."""

    scales: Tensor

    def cut(self) -> Iterator["Float8Read"]:
        """Yield parts of this read, of whole rows of blocks."""
        ((start, stop), columns), sides = self.box, self._sides
        step = max(1, BATCH_BYTES // (BLOCK * max(1, columns[1] - columns[0]) * self.info.dtype.itemsize)) * BLOCK
        for first in range(start // BLOCK * BLOCK, stop, step):
            rows = max(first, start), min(first + step, stop)
            blocks = (rows[0] - start) // sides[0], (rows[1] - start) // sides[0]
            box = rows, columns
            yield replace(
                self, box=box, destination=part_of(self.destination, box, self.box), scales=self.scales[slice(*blocks)]
            )

    @property
    def _sides(self) -> list[int]:
        return [size // count for size, count in zip(extents(self.box), self.scales.shape, strict=True)]

    def fill(self, fd: int, staging: Staging) -> None:
        """See `Read`."""
        name, device = f"{self.name} in {self.path}", self.destination.device
        if isinstance(self.info, Quantized):
            whole = self.info.block
            stored, of_scales = self.info.stored_boxes(self.box)
            first = [start * side for (start, _), side in zip(of_scales, whole, strict=True)]
            read_box(fd, self.info.stored, stored, self.destination, staging, name)
            scales = torch.empty(extents(of_scales), device=device)
            with open_weights(self.info.scale_file) as file:
                read_box(file.fileno(), self.info.scale, of_scales, scales, staging, name)
        else:
            whole = (BLOCK, BLOCK)
            sizes = zip(self.box, self.info.shape, strict=True)
            around: Box = tuple((a // BLOCK * BLOCK, min(-(-b // BLOCK) * BLOCK, size)) for (a, b), size in sizes)
            first = [start for start, _ in around]
            dense = torch.empty(extents(around), dtype=self.info.dtype, device=device)
            read_box(fd, self.info, around, dense, staging, name)
            numbers, scales = quantize(dense)
            self.destination.copy_(part_of(numbers, self.box, around))
        for dim, (count, side) in enumerate(zip(self.scales.shape, self._sides, strict=True)):
            at = torch.arange(count, device=scales.device) * side + self.box[dim][0] - first[dim]
            scales = scales.index_select(dim, at // whole[dim])
        self.scales.copy_(scales)


def float8_reads(source: Source, numbers: Tensor, scales: Tensor, block: Block) -> Iterator[Read]:
    """Yield the reads that fill a local weight and its scales."""
    sides = [size // count for size, count in zip(numbers.shape, scales.shape, strict=True)]
    for key, copy in shared(block, source.pieces):
        path, info = source.tensors[key]
        here = view_of(numbers, copy.destination_range)
        blocks = tuple((a // side, b // side) for (a, b), side in zip(copy.destination_range, sides, strict=True))
        there = view_of(scales, blocks)
        yield Float8Read(key, path, info, copy.source_range, _matrix(here), _matrix(there))


def _matrix(view: Tensor) -> Tensor:
    """Return an expert's matrix in a stack."""
    return view[0] if view.dim() == 3 else view


def scales_of(into: Mapping[str, Tensor] | None, local: str) -> Tensor | None:
    """Return the scales beside a local weight that is to be in FP8."""
    return None if into is None else into.get(local + SCALE)
