"""RMSNorm with an optional residual addition, in one kernel each way.

    s = x + r                       (rounded to x's dtype: s is the residual stream)
    y = s · ρ · w,                  ρ = 1 / sqrt(mean(s²) + eps)
    ds = ρ (g - ŝ mean(g ŝ)) + ds', g = dy · w, ŝ = s ρ, ds' the gradient of the residual stream
    dw = Σ_rows dy ŝ

Forward reads x, r, w and writes y, s and ρ (fp32, one per row). Backward reads dy, ds', s, w, ρ and writes ds, which is
the gradient of both x and r. Each program of the backward keeps its part of dw in registers; the parts are summed in a
fixed order. Shape legend: H normalised size, R rows (all leading dims). https://arxiv.org/abs/1910.07467
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

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
    use_triton,
)

MAX_SIZE = 32768
"""Largest H: one program holds whole rows in registers."""

# Elements of a tile, tuned on an H200. In the forward many programs hide each other's latency. The backward sums dw
# over a program's tiles, so one program runs on each multiprocessor and prefetches all tiles that fit.
_FORWARD_TILE, _BACKWARD_TILE = 2048, 4096


def supports_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> bool:
    """Return True if the kernels can run on these tensors. Under autocast a residual can have a wider dtype than x."""
    alike = residual is None or (residual.dtype == x.dtype and residual.shape == x.shape)
    return alike and use_triton(x, weight, residual) and x.shape[-1] <= MAX_SIZE


def fused_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, *, eps: float = 1e-6, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm and the residual stream: `(norm(x), x)`, or `(norm(x + residual), x + residual)`, `[..., H]`.

    The sum is rounded to x's dtype before the norm. The backward adds the gradients of both results. `unit_offset`
    multiplies by 1 + weight. A strided `[T, N, H]` (heads of a fused projection) is read in place.

    Raises:
        ValueError: The weight or the residual does not fit x, or H is above `MAX_SIZE`.
    """
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, residual, weight, eps, unit_offset)
    normed, total, _ = _forward(x, residual, weight, eps, unit_offset)
    return normed, x if residual is None else total


class _RMSNorm(torch.autograd.Function):
    """An autograd function, because an operator cannot return a view of its argument."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        normed, total, rstd = _forward(x, residual, weight, eps, unit_offset)
        ctx.set_materialize_grads(False)
        ctx.has_residual, ctx.unit_offset = residual is not None, unit_offset
        ctx.save_for_backward(total if ctx.has_residual else x, weight, rstd)
        return normed, total if ctx.has_residual else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dstream: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dweight = dstream, None
        if dy is not None:
            stream, weight, rstd = ctx.saved_tensors
            dx, dweight = _backward(dy, dstream, stream, weight, rstd, ctx.unit_offset)
        return dx, dx if ctx.has_residual else None, dweight, None, None


@triton.jit
def _starts(row, inner, stride_outer, stride_inner, STRIDED: tl.constexpr):
    """Return the offsets `[R, 1]` of the rows `row [R]` (int64)."""
    if STRIDED:
        return ((row // inner) * stride_outer + (row % inner) * stride_inner)[:, None]
    return (row * stride_outer)[:, None]


@triton.jit
def _forward_kernel(
    x_ptr,
    inner,
    x_outer,
    x_inner,
    residual_ptr,
    residual_stride,
    weight_ptr,
    y_ptr,
    total_ptr,
    rstd_ptr,
    count,
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
    dy_inner_count,
    dy_outer,
    dy_inner,
    dtotal_ptr,
    dtotal_stride,
    x_ptr,
    inner,
    x_outer,
    x_inner,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    count,
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
    partial_sum = tl.sum(dweight, axis=0)[None, :]
    tl.store(dweight_ptr + tl.program_id(0) * SIZE + column, partial_sum, mask=column < SIZE)


@triton.jit
def _sum_parts_kernel(parts_ptr, out_ptr, count, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for begin in tl.range(0, count, ROWS):
        row = begin + tl.arange(0, ROWS)[:, None]
        total += tl.load(parts_ptr + row * SIZE + column, mask=(row < count) & (column < SIZE), other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0)[None, :].to(out_ptr.dtype.element_ty), mask=column < SIZE)


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return `x`, n and two strides: row i starts at `(i // n) * strides[0] + (i % n) * strides[1]`."""
    if x.stride(-1) != 1 or (x.dim() > 3 and not x.is_contiguous()):
        x = x.contiguous()
    if x.dim() == 3 and not x.is_contiguous():
        return x, x.shape[1], x.stride(0), x.stride(1)
    return x, 1, x.stride(0) if x.dim() == 2 else x.shape[-1], 0


def _optional_rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    """Return `x` and the stride between its rows."""
    if x is None:
        return None, 0
    x, _, stride, _ = _rows(x if x.dim() == 2 else x.contiguous())
    return x, stride


@torch.library.custom_op("parallel_layers::rms_norm", mutates_args=())
@on_its_device
def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm, x + residual (without a residual an empty tensor) and ρ."""
    size = x.shape[-1]
    like_x = residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    if weight.shape != (size,) or not like_x or size > MAX_SIZE:
        shapes = [f"{y.dtype} {list(y.shape)}" for y in (x, weight, residual) if y is not None]
        raise ValueError(
            f"x, weight (and residual) are {', '.join(shapes)}; the weight must have shape [{size}], the residual must "
            f"be like x, and rows may have at most {MAX_SIZE} elements"
        )
    normed, total, rstd = outputs = _empty_outputs(x, residual)
    block = next_power_of_2(size)
    rows = max(1, min(16, _FORWARD_TILE // block))
    many_warps = block > 8192 or (residual is not None and rows == 1 and size == block)
    if count := rstd.numel():
        x_rows = _rows(x)
        _forward_kernel[(cdiv(count, rows),)](
            *x_rows,
            *_optional_rows(residual),
            weight.contiguous(),
            normed,
            None if residual is None else total,
            rstd,
            count,
            eps,
            SIZE=size,
            BLOCK=block,
            ROWS=rows,
            STAGES=1,
            STRIDED=x_rows[1] > 1,
            ADD=residual is not None,
            UNIT_OFFSET=unit_offset,
            num_warps=min(16, block // 256) if many_warps else 4 if rows == 1 else 2,
        )
    return outputs


def _empty_outputs(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape), total, x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("parallel_layers::rms_norm_backward", mutates_args=())
@on_its_device
def _backward(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, rstd: Tensor, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the residual stream and of the weight; `dstream` is the stream's own gradient.

    One kernel computes the first and parts of the second, another kernel sums the parts.
    """
    dx, dweight = stream.new_empty(stream.shape), weight.new_empty(weight.shape)
    size, count = stream.shape[-1], rstd.numel()
    if count == 0:
        return dx, dweight.zero_()
    block = next_power_of_2(size)
    rows = max(1, min(32, _BACKWARD_TILE // block))
    room = (shared_memory(stream.device) - 16 * 1024) // (3 * rows * stream.element_size())
    programs = min(cdiv(count, rows), num_multiprocessors(stream.device))
    partial_sums = torch.empty((programs, size), dtype=torch.float32, device=stream.device)
    dy_rows, stream_rows = _rows(dy), _rows(stream)
    _backward_kernel[(programs,)](
        *dy_rows,
        *_optional_rows(dstream),
        *stream_rows,
        weight.contiguous(),
        rstd,
        dx,
        partial_sums,
        count,
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        # Full shared memory is slower: rows that fill their tiles take one stage less, but at least two if two fit.
        STAGES=max(1, min(4, room // block, max(2, room // size - 1))),
        X_STRIDED=stream_rows[1] > 1,
        DY_STRIDED=dy_rows[1] > 1,
        ADD=dstream is not None,
        UNIT_OFFSET=unit_offset,
        num_warps=8 if block <= 8192 else 16,
    )
    _sum_parts_kernel[(cdiv(size, 32),)](partial_sums, dweight, programs, SIZE=size, BLOCK=32, ROWS=64, num_warps=8)
    return dx, dweight


@_backward.register_fake
def _(dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return stream.new_empty(stream.shape), weight.new_empty(weight.shape)


_forward.register_fake(_empty_outputs)
