"""Move boxes between files and the memory of tensors, in the longest contiguous runs that both sides allow.

A tensor on another device or of another dtype goes through a bounded staging buffer.
"""

import ctypes
import math
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ckpt.device import GPU
from ckpt.files.dtypes import refuse_overflow
from ckpt.files.header import TensorInfo, Transposed
from ckpt.files.mirror import open_weights
from ckpt.files.quantized import Quantized
from ckpt.layout.pieces import Box, Shape, exchanged, extents, relative, split_box

# Maximum number of bytes of one read or write call; the limit of Linux is 2 GiB.
_CALL_BYTES = 1 << 30
STAGING_BYTES = 16 << 20
_CPU = torch.device("cpu")


class Staging:
    """Reused buffers for transfers that need a copy: in plain memory, and in pinned memory for tensors on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[bool, Tensor] = {}

    def view(self, shape: Shape, dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
        """Return a contiguous tensor over the buffer for transfers with `device`; valid until the next call."""
        needed = math.prod(shape) * dtype.itemsize
        pinned = device.type == GPU
        if pinned not in self._buffers or self._buffers[pinned].numel() < needed:
            self._buffers[pinned] = torch.empty(max(needed, STAGING_BYTES), dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[pinned][:needed].view(dtype).view(shape)

    def chunks(self, box: Box, itemsize: int) -> Iterator[Box]:
        """Cut a box into boxes that fit a buffer."""
        return split_box(box, STAGING_BYTES // itemsize)


def view_of(tensor: Tensor, box: Box) -> Tensor:
    """Return the part of a tensor that a box covers, as a view."""
    for dim, (start, stop) in enumerate(box):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _run_dims(sides: Shape, strides: Shape) -> int:
    """Return how many trailing dimensions of a box lie contiguously in memory; strides count elements."""
    expected = 1
    dims = 0
    for side, stride in zip(reversed(sides), reversed(strides), strict=True):
        if side != 1 and stride != expected:
            break
        expected *= side
        dims += 1
    return dims


def _offsets(base: int, sides: Shape, steps: Shape) -> list[int]:
    """`base` plus every combination of index * step, in row-major order."""
    offsets = [base]
    for side, step in zip(sides, steps, strict=True):
        offsets = [offset + index * step for offset in offsets for index in range(side)]
    return offsets


def _runs(info: TensorInfo, box: Box, view: Tensor) -> tuple[list[int], list[int], int]:
    """Return the contiguous runs of a copy between a file's box and a view of equal extents.

    Returns:
        File offsets, byte offsets from the view's first element, and the bytes of each run.
    """
    item = info.dtype.itemsize
    sides = extents(box)
    file_strides = tuple(math.prod(info.shape[dim + 1 :]) for dim in range(len(info.shape)))
    # Leading dimensions of extent 1 may be extra on either side.
    view_strides = (0,) * (len(sides) - view.dim()) + tuple(view.stride())[max(0, view.dim() - len(sides)) :]
    inner = min(_run_dims(sides, file_strides), _run_dims(sides, view_strides))
    outer = len(sides) - inner
    base = info.offset + sum(start * stride for (start, _), stride in zip(box, file_strides, strict=True)) * item
    at_file = _offsets(base, sides[:outer], tuple(stride * item for stride in file_strides[:outer]))
    at_view = _offsets(0, sides[:outer], tuple(stride * item for stride in view_strides[:outer]))
    return at_file, at_view, math.prod(sides[outer:]) * item


def _memory(view: Tensor) -> memoryview:
    """Return the memory from a strided CPU view's first element to its last; the tensor must outlive the result."""
    last = sum((side - 1) * stride for side, stride in zip(view.shape, view.stride(), strict=True))
    nbytes = (last + 1) * view.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(view.data_ptr())).cast("B")


def _moves_directly(view: Tensor, info: TensorInfo) -> bool:
    """Return whether a view needs no staging buffer; the runs of a transposed view would be single numbers."""
    return (
        not isinstance(info, Transposed)
        and (view.device.type, view.dtype) == ("cpu", info.dtype)
        and view.stride()[-1:] in ((), (1,))
    )


def part_of(view: Tensor, chunk: Box, box: Box) -> Tensor:
    """Return the part of a view of `box` that a chunk of the box covers; leading dimensions of 1 may be extra on either
    side."""
    inside = relative(chunk, box)
    extra = view.dim() - len(inside)
    return view_of(view, ((0, 1),) * extra + inside[max(0, -extra) :])


def read_box(fd: int, info: TensorInfo, box: Box, destination: Tensor, staging: Staging, name: str) -> None:
    """Read a box of a file's tensor into a view of equal extents, casting where the types differ.

    Numbers of few bits are read with their scales, and become values on the destination's device.

    Raises:
        ValueError: The file ended early, or a value is too large for the destination's type; names the tensor `name`.
    """
    if isinstance(info, Quantized):
        _read_quantized(fd, info, box, destination, staging, name)
        return
    if _moves_directly(destination, info):
        _move(os.preadv, fd, info, box, destination)
        return
    for chunk in info.parts(box, STAGING_BYTES // info.dtype.itemsize):
        view, (stored, stored_box) = part_of(destination, chunk, box), _stored(info, chunk)
        buffer = staging.view(extents(stored_box), info.dtype, destination.device)
        _move(os.preadv, fd, stored, stored_box, buffer)
        refuse_overflow(name, buffer, view.dtype)
        view.copy_(_in_canonical_order(info, buffer).reshape(view.shape))


def _read_quantized(fd: int, info: Quantized, box: Box, destination: Tensor, staging: Staging, name: str) -> None:
    with open_weights(info.scale_file) as scales:
        for chunk in info.parts(box, STAGING_BYTES // torch.float32.itemsize):
            view = part_of(destination, chunk, box)
            stored_box, scale_box = info.stored_boxes(chunk)
            stored = staging.view(extents(stored_box), info.stored.dtype, view.device)
            _move(os.preadv, fd, info.stored, stored_box, stored)
            scale = torch.empty(extents(scale_box), dtype=info.scale.dtype)
            _move(os.preadv, scales.fileno(), info.scale, scale_box, scale)
            values = info.values(stored.to(view.device), scale.to(view.device), chunk)
            refuse_overflow(name, values, view.dtype)
            view.copy_(values.reshape(view.shape))


def write_box(fd: int, info: TensorInfo, box: Box, source: Tensor, staging: Staging) -> None:
    """Write a view into a box of a file's tensor, casting where the types differ."""
    if _moves_directly(source, info):
        _move(os.pwritev, fd, info, box, source)
        return
    for chunk in info.parts(box, STAGING_BYTES // info.dtype.itemsize):
        view, (stored, stored_box) = part_of(source, chunk, box), _stored(info, chunk)
        buffer = staging.view(extents(stored_box), info.dtype, source.device)
        _in_canonical_order(info, buffer).copy_(view.reshape(extents(chunk)))
        _move(os.pwritev, fd, stored, stored_box, buffer)


def _stored(info: TensorInfo, box: Box) -> tuple[TensorInfo, Box]:
    """Return a tensor as the file holds it, and a box in the order of the file."""
    return (info.stored, exchanged(box)) if isinstance(info, Transposed) else (info, box)


def _in_canonical_order(info: TensorInfo, buffer: Tensor) -> Tensor:
    """Return a view of elements in the order of the file, with the dimensions of the canonical tensor."""
    return buffer.transpose(-1, -2) if isinstance(info, Transposed) else buffer


def _move(call: Callable[[int, list[memoryview], int], int], fd: int, info: TensorInfo, box: Box, view: Tensor) -> None:
    if view.numel() == 0:
        return
    at_file, at_view, run = _runs(info, box, view)
    memory = _memory(view)
    for offset, start in zip(at_file, at_view, strict=True):
        done = 0
        while done < run:
            moved = call(fd, [memory[start + done : start + min(run, done + _CALL_BYTES)]], offset + done)
            if moved == 0:
                raise ValueError(
                    f"a file ended at byte {offset + done}, inside a tensor; it was truncated while in use"
                )
            done += moved
