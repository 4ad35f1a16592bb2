"""Kernels of a step on moments in low precision: one pass reads, updates and rounds a moment where it is stored.

AdamW reads the master, the gradient and the moments, and writes the master, its low-precision copy and the moments: 18
bytes for each weight with 8-bit moments. The arithmetic follows `moments` and `rounding`. Codes of 8 bits need no
table: with q = 2^k (1 + f), f in [0, 1), the magnitude of level number q of the 2^n above 0 is

    10^(k - n + 1) (0.1 + 0.9 (f + 2^-k / 2)),     1 for q = 2^n,     n = 7, or 8 for values that are never negative

A program computes some blocks of a matrix `[R, C]`; a block is up to 256 elements of a row.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from parallel_layers.kernels import cdiv, next_power_of_2, on_its_device, tl, triton, use_triton
from parallel_models.optimizers.moments import BLOCK, MomentTensors

# Elements of a program, and its warps.
_TILE, _WARPS = 1024, 4


class AdamWNumbers(NamedTuple):
    """The numbers of a step: with g the gradient, m and v the moments and w the master weight,

    m <- m + mean_share (g - m),  v <- second_kept v + second_new g^2
    w <- decay_factor w - rate m / (sqrt(v) / bias + eps)
    """

    decay_factor: float
    mean_share: float
    second_kept: float
    second_new: float
    rate: float
    bias: float
    eps: float


def supports(master: Tensor, gradient: Tensor) -> bool:
    """Return True if the kernels can run on these tensors."""
    return use_triton(master, gradient) and master.element_size() == 4


@triton.jit
def _mixed(x):
    """Mix the bits of uint32 numbers, as `parallel_layers.module.mixed` does."""
    x = (x ^ (x >> 16)) * tl.full([1, 1], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([1, 1], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _draw(row_ptr, column_ptr, row, column, in_row, in_column, key):
    """Return the 32 random bits of each element, see `rounding.random_bits`."""
    rows = tl.load(row_ptr + row, mask=in_row, other=0).to(tl.uint32)
    columns = tl.load(column_ptr + column, mask=in_column, other=0).to(tl.uint32)
    spread = columns * tl.full([1, 1], 0x9E3779B9, tl.uint32)
    return _mixed(_mixed(rows ^ key.to(tl.uint32)) + spread)


@triton.jit
def _power_of_10(exponent):
    return tl.exp2(exponent.to(tl.float32) * 3.321928094887362)


@triton.jit
def _level(q, N: tl.constexpr):
    """Return the magnitude of level number q; 0 for q = 0."""
    number = q.to(tl.float32)
    exponent = number.to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    share = 0.1 + 0.9 * (number * inverse - 1.0 + 0.5 * inverse)
    level = share * _power_of_10((exponent >> 23) - 127 - (N - 1))
    return tl.where(q == 0, 0.0, tl.where(q == (1 << N), 1.0, level))


@triton.jit
def _read(ptr, scale_ptr, offset, scale_offset, inside, in_row, BITS: tl.constexpr, SQUARE: tl.constexpr):
    """Return a moment in fp32."""
    stored = tl.load(ptr + offset, mask=inside, other=0)
    if BITS == 8:
        code = stored.to(tl.int32)
        scale = tl.load(scale_ptr + scale_offset, mask=in_row, other=0.0)
        if SQUARE:
            moment = _level(code + 1, 8) * scale
        else:
            level = _level(tl.where(code < 127, 128 - code, code - 127), 7)
            moment = tl.where(code < 127, -level, level) * scale
    else:
        moment = stored.to(tl.float32)
    return moment


@triton.jit
def _write(
    ptr, scale_ptr, offset, scale_offset, inside, in_row, values, draw, BITS: tl.constexpr, SQUARE: tl.constexpr
):
    """Store a moment, rounded up with the chance `draw` / 2^16."""
    if BITS == 32:
        tl.store(ptr + offset, values, mask=inside)
    elif BITS == 16:
        bits = (values.to(tl.int32, bitcast=True) + draw.to(tl.int32)) & -65536
        tl.store(ptr + offset, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=inside)
    else:
        N: tl.constexpr = 8 if SQUARE else 7
        chance = (draw.to(tl.int32).to(tl.float32) + 0.5) / 65536.0
        size = tl.abs(values)
        largest = tl.max(tl.where(inside, size, 0.0), axis=1)[:, None]
        tl.store(scale_ptr + scale_offset, largest, mask=in_row)
        share = size * (1.0 / tl.maximum(largest, 1.1754943508222875e-38))
        share = tl.where((size >= largest) & (largest > 0), 1.0, share)
        share = tl.maximum(share, 0.55e-7 if SQUARE else 1e-30)
        # The decade of 10^-d, d < N: log10 from the exponent of 2 is right or one too large. Scaled, it ends at 1.
        decade = tl.minimum(((127 - (share.to(tl.int32, bitcast=True) >> 23)) * 1233) >> 12, N - 1)
        scaled = share * _power_of_10(decade)
        over = (scaled >= 1.0) & (decade > 0)
        scaled = tl.where(over, scaled * 0.1, scaled)
        decade = tl.where(over, decade - 1, decade)
        # Level i of the 2^k in this decade, the last one below; -1 is the last level of the decade below.
        count = 1 << (N - 1 - decade)
        width = ((127 - (N - 1) + decade) << 23).to(tl.float32, bitcast=True)
        i = tl.floor((scaled - 0.1) * (count.to(tl.float32) * 1.1111111111111112) - 0.5)
        if SQUARE:
            i = tl.where(decade == N - 1, 0.0, i)  # no level is smaller
        is_last = i + 1.0 >= count.to(tl.float32)
        low = tl.where(i < 0, 0.1 - 0.09 * width, 0.1 + 0.9 * width * (i + 0.5))
        high = tl.where(is_last, tl.where(decade == 0, 1.0, 1.0 + 2.25 * width), 0.1 + 0.9 * width * (i + 1.5))
        q = count + i.to(tl.int32)
        if SQUARE:
            code = q - 1 + (scaled - low > chance * (high - low)).to(tl.int32)
        else:
            # Below level 1 is 0, and no negative number is as small as level 1.
            negative = values < 0
            gap = negative & (q < 2)
            low = tl.where((q == 0) | gap, 0.0, low)
            high = tl.where(gap, tl.where(decade == N - 1, 3.25, 0.325), high)
            lower, upper = tl.where(gap, 0, q), tl.where(gap, 2, q + 1)
            # Codes ascend with the numbers, not with their magnitudes.
            up = tl.where(negative, high - scaled, scaled - low) > chance * (high - low)
            q = tl.where(up == negative, lower, upper)
            code = tl.where(negative & (q > 0), 128 - q, 127 + q)
        tl.store(ptr + offset, code.to(tl.uint8), mask=inside)


@triton.jit
def _offsets(columns, blocks, per_row, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """Return the row, the column, the place, and the masks, of each element of a program's blocks `[BLOCKS, SIZE]`."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    row = block // per_row
    column = (block % per_row) * SIZE + tl.arange(0, SIZE)[None, :]
    in_row = block < blocks
    return block, row, column, row * columns + column, in_row, in_row & (column < columns)


@triton.jit(do_not_specialize=["key"])
def _adamw_kernel(
    master_ptr, gradient_ptr, copy_ptr, first_ptr, first_scale_ptr, second_ptr, second_scale_ptr, row_ptr, column_ptr,
    columns, blocks, per_row, key, decay_factor, mean_share, second_kept, second_new, rate, bias, eps,
    BITS: tl.constexpr, COPY: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    block, row, column, offset, in_row, inside = _offsets(columns, blocks, per_row, BLOCKS, SIZE)
    gradient = tl.load(gradient_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    mean = _read(first_ptr, first_scale_ptr, offset, block, inside, in_row, BITS, False)
    square = _read(second_ptr, second_scale_ptr, offset, block, inside, in_row, BITS, True)
    mean += mean_share * (gradient - mean)
    square = second_kept * square + second_new * gradient * gradient
    master = tl.load(master_ptr + offset, mask=inside, other=0.0)
    master = master * decay_factor - rate * mean / (tl.sqrt(square) / bias + eps)
    tl.store(master_ptr + offset, master, mask=inside)
    if COPY:
        tl.store(copy_ptr + offset, master.to(copy_ptr.dtype.element_ty), mask=inside)
    draw = _draw(row_ptr, column_ptr, row, column, in_row, inside, key)
    _write(first_ptr, first_scale_ptr, offset, block, inside, in_row, mean, draw & 0xFFFF, BITS, False)
    _write(second_ptr, second_scale_ptr, offset, block, inside, in_row, square, draw >> 16, BITS, True)


@triton.jit(do_not_specialize=["key"])
def _momentum_kernel(
    gradient_ptr, buffer_ptr, scale_ptr, row_ptr, column_ptr, columns, blocks, per_row, key, momentum,
    BITS: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    block, row, column, offset, in_row, inside = _offsets(columns, blocks, per_row, BLOCKS, SIZE)
    gradient = tl.load(gradient_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    buffer = _read(buffer_ptr, scale_ptr, offset, block, inside, in_row, BITS, False)
    buffer = gradient + momentum * (buffer - gradient)
    tl.store(gradient_ptr + offset, gradient + momentum * (buffer - gradient), mask=inside)
    draw = _draw(row_ptr, column_ptr, row, column, in_row, inside, key)
    _write(buffer_ptr, scale_ptr, offset, block, inside, in_row, buffer, draw & 0xFFFF, BITS, False)


def _launch(kernel: Any, matrix: Tensor, *args: Any, bits: int, **constants: Any) -> None:
    """Launch a kernel over the blocks of a matrix; `args` are its tensors, then its numbers behind the sizes."""
    rows, columns = matrix.shape
    size = min(BLOCK, next_power_of_2(columns))
    per_row = cdiv(columns, BLOCK)
    count = max(1, _TILE // size)
    tensors = [x for x in args if x is None or isinstance(x, Tensor)]
    numbers = args[len(tensors) :]
    kernel[(cdiv(rows * per_row, count),)](
        *tensors, columns, rows * per_row, per_row, *numbers,
        BITS=bits, BLOCKS=count, SIZE=size, **constants, num_warps=_WARPS,
    )  # fmt: skip


def _signed(key: int) -> int:
    """Return the same 32 bits as a signed number, so that all keys have one type for Triton."""
    return key - (1 << 32) if key >> 31 else key


def _pointers(moment: MomentTensors) -> tuple[Tensor, Tensor | None]:
    """Return the values or codes, and the scales if there are some."""
    return moment[0], moment[1] if len(moment) > 1 else None


@on_its_device
def adamw_(
    master: Tensor, gradient: Tensor, copy: Tensor | None, first: MomentTensors, second: MomentTensors, bits: int,
    rows: Tensor, columns: Tensor, key: int, numbers: AdamWNumbers,
) -> None:  # fmt: skip
    """Step a matrix `[R, C]` of fp32 master weights whose moments have `bits`, and write its low-precision copy.

    `rows` and `columns` are the `Coordinates` of its elements, `key` is the key of the step's random numbers.
    """
    if master.numel():
        _launch(
            _adamw_kernel, master, master, gradient, copy, *_pointers(first), *_pointers(second), rows,
            columns, _signed(key), *numbers, bits=bits, COPY=copy is not None,
        )  # fmt: skip


@on_its_device
def average_(
    gradient: Tensor, buffer: MomentTensors, bits: int, rows: Tensor, columns: Tensor, key: int, momentum: float
) -> None:
    """Add a gradient `[R, C]` to its momentum, and replace the gradient by Nesterov's momentum, see `muon`."""
    if gradient.numel():
        _launch(
            _momentum_kernel, gradient, gradient, *_pointers(buffer), rows, columns, _signed(key), momentum, bits=bits
        )
