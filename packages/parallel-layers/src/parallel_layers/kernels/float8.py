"""Quantisation of rows to FP8 with powers of two as scales, and the transposition of rows in FP8.

    s = 2^ceil(log2(max |x| / 448)) of each row x,   q = round(x / s) in float8_e4m3fn

A power of two only moves the exponent, so a row in FP8 takes another scale without a second rounding of its mantissa;
only numbers below 2^-6 of the new scale lose bits. The transposed operand of a weight gradient is made in this way.

Shape legend: R rows, K columns, g groups of consecutive rows, P positions: the groups' rows with padding.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, has_triton, next_power_of_2, on_its_device, tl, triton

FLOAT8 = torch.float8_e4m3fn
SMALLEST = 2.0**-126
"""The scale of rows of zeros."""
_MULTIPLE = 16  # divides both sizes of a GEMM in FP8
_MAX_BLOCK = 32768
PADDING = 128
"""The rows of a tile: groups are padded to multiples, as the GEMM's own tiles are."""
_COLUMNS = 64


def suits_gemm(weight: Tensor) -> bool:
    """Return whether a GEMM takes copies in FP8 of a weight `[..., N, K]`: of any on a CPU, on a GPU of bf16 alone."""
    sizes_fit = all(size % _MULTIPLE == 0 for size in weight.shape[-2:])
    return sizes_fit and not (weight.is_cuda and weight.dtype != torch.bfloat16)


@triton.jit
def scale_of(largest):
    """Return the scale of numbers of which `largest` (fp32) is the largest absolute value, and its inverse."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 is 1.75 * 2^8
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _rows_kernel(x_ptr, q_ptr, scales_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * size
    q_ptr += row * size
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x))
    for start in range(BLOCK, size, BLOCK):
        block = tl.load(x_ptr + start + column, mask=start + column < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(block)))
    scale, inverse = scale_of(largest)
    tl.store(scales_ptr + row, scale)
    tl.store(q_ptr + column, (x * inverse).to(q_ptr.dtype.element_ty), mask=column < size)
    for start in range(BLOCK, size, BLOCK):
        block = tl.load(x_ptr + start + column, mask=start + column < size, other=0.0).to(tl.float32)
        tl.store(q_ptr + start + column, (block * inverse).to(q_ptr.dtype.element_ty), mask=start + column < size)


@triton.jit
def _scale_kernel(y_ptr, row_scales_ptr, column_scales_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(column_scales_ptr + column, mask=column < size, other=0.0) * tl.load(row_scales_ptr + row)
    y = tl.load(y_ptr + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * size + column, (y * scale).to(y_ptr.dtype.element_ty), mask=column < size)


@triton.jit
def _largest_kernel(scales_ptr, ends_ptr, largest_ptr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    largest = tl.full((BLOCK,), SMALLEST, tl.float32)
    for begin in range(start, end, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(scales_ptr + row, mask=row < end, other=SMALLEST))
    tl.store(largest_ptr + group, tl.max(largest))


@triton.jit
def _transpose_kernel(
    x_ptr, row_scales_ptr, scales_ptr, ends_ptr, padded_ptr, q_ptr, size, groups, rows, stride,
    RAGGED: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if RAGGED:  # groups of any size, side by side; each begins with a tile
        position = tile * ROWS
        group, above = groups * 0, groups
        for _ in tl.static_range(STEPS):  # the number of groups that end at or before the position
            middle = (group + above) // 2
            is_below = (group < above) & (tl.load(padded_ptr + middle, mask=middle < groups, other=0) <= position)
            above = tl.where(is_below | (group >= above), above, middle)
            group = tl.where(is_below, middle + 1, group)
        inside = group < groups
        end = tl.load(ends_ptr + group, mask=inside, other=0)
        start = tl.load(ends_ptr + group - 1, mask=inside & (group > 0), other=0)
        row = start + position - tl.load(padded_ptr + group - 1, mask=inside & (group > 0), other=0)
        target = position.to(tl.int64)
    else:  # groups of `rows` rows, each a separate matrix
        tiles = tl.cdiv(rows, ROWS)
        group = tile // tiles
        inside = group < groups
        offset = (tile % tiles) * ROWS
        row, end = group * rows + offset, (group + 1) * rows
        target = group.to(tl.int64) * rows * size + offset
    of_tile = tl.arange(0, ROWS)
    valid = (row + of_tile < end) & inside
    # The exponent of 1 / 2^e is -e; a division would be rounded.
    bits = tl.load(scales_ptr + group, mask=inside, other=1.0).to(tl.int32, bitcast=True)
    factor = ((254 << 23) - bits).to(tl.float32, bitcast=True) + tl.zeros((ROWS,), tl.float32)
    if RAGGED:
        factor *= tl.load(row_scales_ptr + row + of_tile, mask=valid, other=0.0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(
        x_ptr + (row + of_tile).to(tl.int64)[:, None] * size + column[None, :],
        mask=valid[:, None] & (column < size)[None, :], other=0.0,
    )  # fmt: skip
    q = (x.to(tl.float32) * factor[:, None]).to(q_ptr.dtype.element_ty)
    stored = (of_tile >= 0) & inside if RAGGED else valid
    tl.store(
        q_ptr + target + column.to(tl.int64)[:, None] * stride + of_tile[None, :], tl.trans(q),
        mask=(column < size)[:, None] & stored[None, :],
    )  # fmt: skip


@torch.library.custom_op("parallel_layers::quantize_rows", mutates_args=())
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows `[..., K]` to float8_e4m3fn; return them and the scales `[...]` fp32, which are powers of two.

    No gradient.
    """
    if not has_triton(x):
        largest = x.abs().amax(-1).float()
        mantissa, exponent = torch.frexp(largest)  # largest = mantissa 2^exponent with mantissa in [0.5, 1)
        exponent = (exponent - 9 + (mantissa > 0.875)).clamp(-126, 126)
        scales = torch.where(largest == 0, SMALLEST, torch.ldexp(torch.ones_like(largest), exponent))
        return (x.float() / scales[..., None]).to(FLOAT8), scales
    x = x.contiguous()
    q, scales = _empty_rows(x)
    if x.numel():
        block = min(_MAX_BLOCK, next_power_of_2(x.shape[-1]))
        warps = min(max(block // 1024, 1), 16)
        _launch(x, _rows_kernel, (scales.numel(),), q, scales, x.shape[-1], BLOCK=block, num_warps=warps)
    return q, scales


@quantize_rows.register_fake
def _empty_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=FLOAT8, device=x.device), x.new_empty(x.shape[:-1], dtype=torch.float32)


def scale_(y_RK: Tensor, row_scales_R: Tensor, column_scales_K: Tensor) -> Tensor:
    """Multiply a contiguous matrix `[R, K]` in place by scales of its rows and columns, and return it. No gradient."""
    if not has_triton(y_RK):
        return y_RK.mul_(row_scales_R[:, None]).mul_(column_scales_K)
    if y_RK.numel():
        rows, size = y_RK.shape
        _launch(
            y_RK, _scale_kernel, (rows, cdiv(size, 1024)), row_scales_R, column_scales_K, size, BLOCK=1024, num_warps=4
        )
    return y_RK


@torch.library.custom_op("parallel_layers::scales_of_groups", mutates_args=())
def scales_of_groups(scales_R: Tensor, ends_g: Tensor) -> Tensor:
    """Return the largest scale of each group of rows, `[g]`; group i ends before row `ends[i]` (int32). No gradient."""
    largest = scales_R.new_full(ends_g.shape, SMALLEST)
    if has_triton(scales_R):
        _launch(scales_R, _largest_kernel, (len(ends_g),), ends_g, largest, SMALLEST, BLOCK=1024)
        return largest
    return largest.scatter_reduce(0, _groups(ends_g, len(scales_R)), scales_R, "amax")


@scales_of_groups.register_fake
def _(scales_R: Tensor, ends_g: Tensor) -> Tensor:
    return scales_R.new_empty(ends_g.shape)


@torch.library.custom_op("parallel_layers::transpose_groups", mutates_args=())
def transpose_groups(
    q_RK: Tensor, scales_R: Tensor, scales_g: Tensor, ends_g: Tensor, padded_g: Tensor, positions: int
) -> Tensor:
    """Transpose rows in FP8 to one scale for each of their groups: `[R, K]` -> `[K, P]`, P = `positions`.

    Group i has the columns before `padded[i]` (int32), which has no more rows than places. Columns without a row are
    zero, and columns after the last group are undefined. `padded` and P are multiples of `PADDING`. No gradient.
    """
    if has_triton(q_RK):
        q = q_RK.new_empty(q_RK.shape[1], positions)
        _launch_transpose(q_RK, scales_R, scales_g, ends_g, padded_g, q, positions // PADDING, 0, positions)
        return q
    group = _groups(ends_g, len(q_RK))
    offsets = padded_g.roll(1) - ends_g.roll(1)
    offsets[0] = 0
    values = q_RK.new_zeros(positions, q_RK.shape[1], dtype=torch.float32)
    values[torch.arange(len(q_RK), device=q_RK.device) + offsets[group]] = (
        q_RK.float() * (scales_R / scales_g[group])[:, None]
    )
    return values.t().contiguous().to(FLOAT8)


@transpose_groups.register_fake
def _(q_RK: Tensor, scales_R: Tensor, scales_g: Tensor, ends_g: Tensor, padded_g: Tensor, positions: int) -> Tensor:
    return q_RK.new_empty(q_RK.shape[1], positions)


@torch.library.custom_op("parallel_layers::quantize_transposed", mutates_args=())
def quantize_transposed(x_gRK: Tensor, scales_g: Tensor) -> Tensor:
    """Quantise matrices with one scale each, `[g, R, K]`, and transpose them: `[g, K, R]`, R a multiple of 16.

    No gradient.
    """
    g, R, K = x_gRK.shape
    if not has_triton(x_gRK):
        return (x_gRK.float() / scales_g[:, None, None]).to(FLOAT8).transpose(1, 2).contiguous()
    x, q = x_gRK.contiguous(), torch.empty(g, K, R, dtype=FLOAT8, device=x_gRK.device)
    _launch_transpose(x, None, scales_g, scales_g, scales_g, q, g * cdiv(R, PADDING), R, R)
    return q


@quantize_transposed.register_fake
def _(x_gRK: Tensor, scales_g: Tensor) -> Tensor:
    g, R, K = x_gRK.shape
    return torch.empty(g, K, R, dtype=FLOAT8, device=x_gRK.device)


def _groups(ends_g: Tensor, rows: int) -> Tensor:
    """Return the group of each row, `[R]`."""
    return torch.searchsorted(ends_g, torch.arange(rows, device=ends_g.device, dtype=ends_g.dtype), right=True)


@on_its_device
def _launch(x: Tensor, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    kernel[grid](x, *arguments, **options)


def _launch_transpose(
    x: Tensor, row_scales: Tensor | None, scales: Tensor, ends: Tensor, padded: Tensor, q: Tensor,
    tiles: int, rows: int, stride: int,
) -> None:  # fmt: skip
    """Launch the kernel, with row scales over ragged groups; else over matrices of `rows` rows."""
    if q.numel():
        ragged, grid = row_scales is not None, (tiles, cdiv(x.shape[-1], _COLUMNS))
        _launch(
            x, _transpose_kernel, grid, scales if row_scales is None else row_scales, scales, ends, padded, q,
            x.shape[-1], len(scales), rows, stride,
            RAGGED=ragged, STEPS=len(scales).bit_length(), ROWS=PADDING, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip
