"""The Triton code of RMSNorm and its launches; `parallel_layers.kernels.rms_norm` says what the kernels compute.

Each program walks rows in a fixed stride and keeps its part of dw in registers. The parts are summed in a fixed order,
so the result is the same at every run. All arithmetic is fp32.

Shape legend: H normalised size, R rows (all leading dims).
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import (
    cdiv,
    next_power_of_2,
    num_multiprocessors,
    on_its_device,
    shared_memory,
    tl,
    triton,
)

MAX_SIZE = 32768
"""Largest H: one program holds whole rows in registers."""


@dataclass(frozen=True)
class Launch:
    """The tiling of a forward or backward pass.

    Attributes:
        rows: Rows of one tile.
        num_warps: Warps of one program.
        programs: Programs per multiprocessor, each of which walks several tiles; None: one program per tile.
        stages: Tiles in flight in a program's loop.
    """

    rows: int
    num_warps: int
    programs: int | None = None
    stages: int = 1


# Elements of a tile, tuned on an H200. In the forward many programs hide each other's latency. The backward sums dw
# over a program's tiles, so one program runs on each multiprocessor and prefetches as many tiles as fit.
_FORWARD_TILE, _BACKWARD_TILE = 2048, 4096


def forward_launch(size: int, *, residual: bool) -> Launch:
    """Return the launch of the forward for rows of `size` elements."""
    block = next_power_of_2(size)
    rows = max(1, min(16, _FORWARD_TILE // block))
    if block > 8192 or (residual and rows == 1 and size == block):
        return Launch(rows=rows, num_warps=min(16, block // 256))
    return Launch(rows=rows, num_warps=4 if rows == 1 else 2)


def backward_launch(size: int, element_size: int, device: torch.device) -> Launch:
    """Return the launch of the backward for rows of `size` elements of `element_size` bytes."""
    block = next_power_of_2(size)
    rows = max(1, min(32, _BACKWARD_TILE // block))
    room = (shared_memory(device) - 16 * 1024) // (3 * rows * element_size)
    # Full shared memory is slower: rows that fill their tiles take one stage less, but at least two if two fit.
    stages = min(4, room // block, max(2, room // size - 1))
    return Launch(rows=rows, num_warps=8 if block <= 8192 else 16, programs=1, stages=max(1, stages))


@dataclass(frozen=True)
class _Rows:
    """Rows of a tensor: row i starts at `(i // inner) * stride_outer + (i % inner) * stride_inner`."""

    tensor: Tensor
    count: int
    inner: int
    stride_outer: int
    stride_inner: int

    @classmethod
    def of(cls, x: Tensor) -> "_Rows":
        if x.stride(-1) != 1 or (x.dim() > 3 and not x.is_contiguous()):
            x = x.contiguous()
        size = x.shape[-1]
        if x.dim() == 3 and not x.is_contiguous():
            return cls(x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1))
        count = x.numel() // size
        return cls(x, count, 1, x.stride(0) if x.dim() == 2 else size, 0)


@triton.jit
def _starts(row, inner, stride_outer, stride_inner, STRIDED: tl.constexpr):
    """Return the offsets `[R, 1]` of the rows `row [R]` (int64)."""
    if STRIDED:
        return ((row // inner) * stride_outer + (row % inner) * stride_inner)[:, None]
    return (row * stride_outer)[:, None]


@triton.jit
def _forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    rstd_ptr,
    count,
    inner,
    x_outer,
    x_inner,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    STRIDED: tl.constexpr,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < count)[:, None] & (column < SIZE)
        x = tl.load(x_ptr + _starts(row, inner, x_outer, x_inner, STRIDED) + column, mask=mask, other=0.0)
        dense = (row * SIZE)[:, None] + column
        if ADD:
            residual = tl.load(residual_ptr + (row * residual_stride)[:, None] + column, mask=mask, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + dense, x, mask=mask)
        wide = x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
        tl.store(rstd_ptr + row, rstd, mask=row < count)
        tl.store(y_ptr + dense, (wide * rstd[:, None] * weight).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,
    dtotal_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    count,
    inner,
    x_outer,
    x_inner,
    dy_inner_count,
    dy_outer,
    dy_inner,
    dtotal_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    X_STRIDED: tl.constexpr,
    DY_STRIDED: tl.constexpr,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < count)[:, None] & (column < SIZE)
        x = tl.load(
            x_ptr + _starts(row, inner, x_outer, x_inner, X_STRIDED) + column,
            mask=mask,
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        dy = tl.load(
            dy_ptr + _starts(row, dy_inner_count, dy_outer, dy_inner, DY_STRIDED) + column,
            mask=mask,
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < count, other=0.0)[:, None]
        normed = x * rstd
        dweight += dy * normed
        dnormed = dy * weight
        dx = rstd * (dnormed - normed * (tl.sum(dnormed * normed, axis=1) / SIZE)[:, None])
        if ADD:
            dx += tl.load(
                dtotal_ptr + (row * dtotal_stride)[:, None] + column,
                mask=mask,
                other=0.0,
                eviction_policy="evict_first",
            ).to(tl.float32)
        tl.store(dx_ptr + (row * SIZE)[:, None] + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    part = tl.sum(dweight, axis=0)[None, :]
    tl.store(dweight_ptr + tl.program_id(0) * SIZE + column, part, mask=column < SIZE)


@triton.jit
def _sum_parts_kernel(parts_ptr, out_ptr, count, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in tl.range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(parts_ptr + row * SIZE + column, mask=(row < count) & (column < SIZE), other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0)[None, :].to(out_ptr.dtype.element_ty), mask=column < SIZE)


def _check(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    size = x.shape[-1]
    if weight.shape != (size,):
        raise ValueError(f"weight has shape {list(weight.shape)}; x {list(x.shape)} needs a weight of shape [{size}]")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual is {residual.dtype} {list(residual.shape)} and x is {x.dtype} {list(x.shape)}; make them agree"
        )
    if size > MAX_SIZE:
        raise ValueError(f"rows of {size} exceed the kernel's {MAX_SIZE}; use parallel_layers.norm.rms_norm.rms_norm")


def _programs(launch: Launch, count: int, device: torch.device) -> int:
    tiles = cdiv(count, launch.rows)
    return tiles if launch.programs is None else min(tiles, launch.programs * num_multiprocessors(device))


@on_its_device
def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool, launch: Launch
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return `(normed, total or None, rstd)`, computed by one kernel."""
    _check(x, weight, residual)
    rows = _Rows.of(x)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(normed)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if rows.count == 0:
        return normed, total, rstd
    residual_rows = None if residual is None else _Rows.of(residual if residual.dim() == 2 else residual.contiguous())
    size = x.shape[-1]
    _forward_kernel[(_programs(launch, rows.count, x.device),)](
        rows.tensor,
        None if residual_rows is None else residual_rows.tensor,
        weight.contiguous(),
        normed,
        total,
        rstd,
        rows.count,
        rows.inner,
        rows.stride_outer,
        rows.stride_inner,
        0 if residual_rows is None else residual_rows.stride_outer,
        eps,
        SIZE=size,
        BLOCK=next_power_of_2(size),
        ROWS=launch.rows,
        STAGES=launch.stages,
        STRIDED=rows.inner > 1,
        ADD=residual is not None,
        UNIT_OFFSET=unit_offset,
        num_warps=launch.num_warps,
    )
    return normed, total, rstd


@on_its_device
def launch_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, unit_offset: bool, launch: Launch
) -> tuple[Tensor, Tensor]:
    """Return `(dx, dweight)`: one kernel computes dx and parts of dweight, a second one sums the parts."""
    rows, dy_rows = _Rows.of(x), _Rows.of(dy)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.count == 0:
        return dx, torch.zeros_like(weight)
    dtotal_rows = None if dtotal is None else _Rows.of(dtotal if dtotal.dim() == 2 else dtotal.contiguous())
    size = x.shape[-1]
    programs = _programs(launch, rows.count, x.device)
    parts = torch.empty((programs, size), dtype=torch.float32, device=x.device)
    _backward_kernel[(programs,)](
        dy_rows.tensor,
        None if dtotal_rows is None else dtotal_rows.tensor,
        rows.tensor,
        weight.contiguous(),
        rstd,
        dx,
        parts,
        rows.count,
        rows.inner,
        rows.stride_outer,
        rows.stride_inner,
        dy_rows.inner,
        dy_rows.stride_outer,
        dy_rows.stride_inner,
        0 if dtotal_rows is None else dtotal_rows.stride_outer,
        SIZE=size,
        BLOCK=next_power_of_2(size),
        ROWS=launch.rows,
        STAGES=launch.stages,
        X_STRIDED=rows.inner > 1,
        DY_STRIDED=dy_rows.inner > 1,
        ADD=dtotal is not None,
        UNIT_OFFSET=unit_offset,
        num_warps=launch.num_warps,
    )
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    _sum_parts_kernel[(cdiv(size, 32),)](parts, dweight, programs, SIZE=size, BLOCK=32, ROWS=64, num_warps=8)
    return dx, dweight
