"""Triton kernels of distillation: a tile of a teacher's and a student's raw products, read once, and reduced.

One program takes one token. `head.divergence` has the mathematics, and the same functions in torch. Raw products and
all arithmetic are fp32.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_layers.kernels.head_triton import tanh_of
from parallel_layers.kernels.runtime import on_its_device, tl, triton

_BLOCK = 1024
# The logarithm of what has no probability: finite, so that its product with 0 is 0.
_NEGLIGIBLE = tl.constexpr(-1e4)

Weights = tuple[float, float, float]
"""The weights of teacher and student, and the teacher's share of the mixture: a `head.divergence.Divergence`."""


@triton.jit
def _logits(
    raw_ptr, columns, mask, row, scale, softcap, inverse_temperature, inverse_temperatures_ptr, SOFTCAP: tl.constexpr
):
    """Return the logits of a token, -inf outside of `mask`, and their derivatives by the raw products."""
    raw = tl.load(raw_ptr + columns, mask=mask, other=0.0)
    factor = inverse_temperature
    if inverse_temperatures_ptr is not None:
        factor *= tl.load(inverse_temperatures_ptr + row)
    if SOFTCAP:
        tanh = tanh_of(raw * (scale / softcap))
        logits = tanh * (softcap * factor)
        derivatives = (1.0 - tanh * tanh) * (scale * factor)
    else:
        logits = raw * (scale * factor)
        derivatives = tl.zeros_like(raw) + scale * factor
    return tl.where(mask, logits, float("-inf")), derivatives


@triton.jit
def _shift(old, new):
    """Return `old - new` of two maxima, 0 for an old one of -inf, and its exponential, 0 for an old one of -inf."""
    shift = tl.where(old == float("-inf"), 0.0, old - new)
    return shift, tl.where(old == float("-inf"), 0.0, tl.exp(shift))


@triton.jit
def _statistics_kernel(
    x_ptr, z_ptr, statistics_ptr, statistics_stride, num_entries,
    x_scale, x_softcap, x_inverse, x_inverses_ptr, z_scale, z_softcap, z_inverse, z_inverses_ptr,
    X_SOFTCAP: tl.constexpr, Z_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * num_entries
    z_ptr += row.to(tl.int64) * num_entries
    statistics_ptr += row
    max_x = tl.load(statistics_ptr)
    sum_x = tl.load(statistics_ptr + statistics_stride)
    moment_x = tl.load(statistics_ptr + 2 * statistics_stride)
    max_z = tl.load(statistics_ptr + 3 * statistics_stride)
    sum_z = tl.load(statistics_ptr + 4 * statistics_stride)
    moment_z = tl.load(statistics_ptr + 5 * statistics_stride)
    for begin in range(0, num_entries, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        mask = columns < num_entries
        x, _ = _logits(x_ptr, columns, mask, row, x_scale, x_softcap, x_inverse, x_inverses_ptr, X_SOFTCAP)
        z, _ = _logits(z_ptr, columns, mask, row, z_scale, z_softcap, z_inverse, z_inverses_ptr, Z_SOFTCAP)
        new_x = tl.maximum(max_x, tl.max(x, 0))
        new_z = tl.maximum(max_z, tl.max(z, 0))
        x -= tl.where(new_x == float("-inf"), 0.0, new_x)
        z -= tl.where(new_z == float("-inf"), 0.0, new_z)
        p = tl.exp(x)
        q = tl.exp(z)
        shift_x, factor_x = _shift(max_x, new_x)
        shift_z, factor_z = _shift(max_z, new_z)
        moment_x = tl.where(factor_x == 0, 0.0, (moment_x + (shift_x - shift_z) * sum_x) * factor_x)
        moment_z = tl.where(factor_z == 0, 0.0, (moment_z + (shift_z - shift_x) * sum_z) * factor_z)
        # An entry without weight adds 0, although its difference may be infinite or NaN.
        moment_x += tl.sum(tl.where(p == 0, 0.0, p * (x - z)), 0)
        moment_z += tl.sum(tl.where(q == 0, 0.0, q * (z - x)), 0)
        sum_x = sum_x * factor_x + tl.sum(p, 0)
        sum_z = sum_z * factor_z + tl.sum(q, 0)
        max_x = new_x
        max_z = new_z
    tl.store(statistics_ptr, max_x)
    tl.store(statistics_ptr + statistics_stride, sum_x)
    tl.store(statistics_ptr + 2 * statistics_stride, moment_x)
    tl.store(statistics_ptr + 3 * statistics_stride, max_z)
    tl.store(statistics_ptr + 4 * statistics_stride, sum_z)
    tl.store(statistics_ptr + 5 * statistics_stride, moment_z)


@triton.jit
def _log(log_prob):
    # A comparison keeps NaN, which tl.maximum would drop.
    return tl.where(log_prob < _NEGLIGIBLE, _NEGLIGIBLE, log_prob)


@triton.jit
def _student_terms(log_p, log_q, teacher, student, log_share, log_rest, MIXES: tl.constexpr, REVERSE: tl.constexpr):
    """Return the terms of D (of a mixture), the terms c, and q."""
    q = tl.exp(log_q)
    if MIXES:
        p = tl.exp(log_p)
        log_p = _log(log_p)
        log_q = _log(log_q)
        scaled_p = log_p + log_share
        scaled_q = log_q + log_rest
        larger = tl.where(scaled_p > scaled_q, scaled_p, scaled_q)
        log_m = larger + tl.log(1.0 + tl.exp(-tl.abs(scaled_p - scaled_q)))
        r = tl.exp(scaled_q - log_m)
        gain_q = student * q * (log_q - log_m)
        terms = teacher * p * (log_p - log_m) + gain_q
        c = gain_q + student * q * (1.0 - r) - teacher * p * r
    elif REVERSE:
        c = tl.where(q == 0, 0.0, q * (log_q - log_p + 1.0))
        terms = c
    else:
        c = -tl.exp(log_p)
        terms = c
    return terms, c, q


@triton.jit
def _mixture_kernel(
    x_ptr, z_ptr, x_logsumexp_ptr, z_logsumexp_ptr, sums_ptr, sums_stride, num_entries,
    x_scale, x_softcap, x_inverse, x_inverses_ptr, z_scale, z_softcap, z_inverse, z_inverses_ptr,
    teacher, student, log_share, log_rest,
    X_SOFTCAP: tl.constexpr, Z_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * num_entries
    z_ptr += row.to(tl.int64) * num_entries
    x_logsumexp = tl.load(x_logsumexp_ptr + row)
    z_logsumexp = tl.load(z_logsumexp_ptr + row)
    divergence = tl.load(sums_ptr + row)
    total = tl.load(sums_ptr + sums_stride + row)
    for begin in range(0, num_entries, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        mask = columns < num_entries
        x, _ = _logits(x_ptr, columns, mask, row, x_scale, x_softcap, x_inverse, x_inverses_ptr, X_SOFTCAP)
        z, _ = _logits(z_ptr, columns, mask, row, z_scale, z_softcap, z_inverse, z_inverses_ptr, Z_SOFTCAP)
        terms, c, _ = _student_terms(
            x - x_logsumexp, z - z_logsumexp, teacher, student, log_share, log_rest, True, False
        )  # fmt: skip
        divergence += tl.sum(terms, 0)
        total += tl.sum(c, 0)
    tl.store(sums_ptr + row, divergence)
    tl.store(sums_ptr + sums_stride + row, total)


@triton.jit
def _gradient_kernel(
    x_ptr, z_ptr, x_logsumexp_ptr, z_logsumexp_ptr, total_ptr, upstream_ptr, gradient_ptr, num_entries,
    x_scale, x_softcap, x_inverse, x_inverses_ptr, z_scale, z_softcap, z_inverse, z_inverses_ptr,
    teacher, student, log_share, log_rest,
    X_SOFTCAP: tl.constexpr, Z_SOFTCAP: tl.constexpr, MIXES: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    begin_of_row = row.to(tl.int64) * num_entries
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_entries
    x, _ = _logits(
        x_ptr + begin_of_row, columns, mask, row, x_scale, x_softcap, x_inverse, x_inverses_ptr, X_SOFTCAP
    )  # fmt: skip
    z, derivatives = _logits(
        z_ptr + begin_of_row, columns, mask, row, z_scale, z_softcap, z_inverse, z_inverses_ptr, Z_SOFTCAP
    )  # fmt: skip
    log_p = x - tl.load(x_logsumexp_ptr + row)
    log_q = z - tl.load(z_logsumexp_ptr + row)
    _, c, q = _student_terms(log_p, log_q, teacher, student, log_share, log_rest, MIXES, REVERSE)
    gradient = (c - q * tl.load(total_ptr + row)) * tl.load(upstream_ptr + row) * derivatives
    tl.store(gradient_ptr + begin_of_row + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=mask)


class Logits(NamedTuple):
    """A tile of raw products `[t, v]`, contiguous in fp32, and their transform into logits, as `head.LogitTransform`.

    `temperature` is a number, or one number a token of the tile, `[t]`.
    """

    products: Tensor
    scale: float
    softcap: float
    temperature: Tensor | float

    def arguments(self) -> tuple[float, float, float, Tensor | None]:
        """Return the numbers of a kernel: scale, soft-cap, inverse temperature of all tokens, and of each token."""
        if isinstance(self.temperature, Tensor):
            return self.scale, self.softcap, 1.0, self.temperature.float().reciprocal()
        return self.scale, self.softcap, 1.0 / self.temperature, None


def add_statistics_(statistics_6T: Tensor, teacher: Logits, student: Logits) -> None:
    """Merge a tile into the statistics of its tokens, rows of any stride."""
    tokens, entries = student.products.shape
    if tokens and entries and not statistics_6T.is_meta:
        _launch(_statistics_kernel, (tokens,), teacher, student, (statistics_6T, statistics_6T.stride(0)))


def add_mixture_sums_(
    sums_2T: Tensor, teacher: Logits, student: Logits, logsumexps_2T: Tensor, weights: Weights
) -> None:
    """Add a tile's part of D and of the sum of c."""
    tokens, entries = student.products.shape
    if tokens and entries and not sums_2T.is_meta:
        tensors = (*logsumexps_2T, sums_2T, sums_2T.stride(0))
        _launch(_mixture_kernel, (tokens,), teacher, student, tensors, _numbers(weights))


def product_gradients(
    teacher: Logits, student: Logits, rows: tuple[Tensor, ...], weights: Weights, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the student's raw products; `rows` are the fields of `head.divergence.Constants`."""
    gradient = torch.empty_like(student.products, dtype=dtype)
    tokens, entries = gradient.shape
    if tokens and entries and not gradient.is_meta:
        kind = {"MIXES": 0.0 < weights[2] < 1.0, "REVERSE": weights[2] == 1.0}
        grid = (tokens, triton.cdiv(entries, _BLOCK))
        _launch(_gradient_kernel, grid, teacher, student, (*rows, gradient), _numbers(weights), **kind)
    return gradient


def _numbers(weights: Weights) -> tuple[float, ...]:
    teacher, student, share = weights
    mixes = 0.0 < share < 1.0
    return teacher, student, math.log(share) if mixes else 0.0, math.log1p(-share) if mixes else 0.0


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    teacher: Logits,
    student: Logits,
    tensors: tuple[Any, ...],
    numbers: tuple[float, ...] = (),
    **kind: bool,
) -> None:
    @on_its_device
    def launch(products: Tensor) -> None:
        kernel[grid](
            teacher.products, products, *tensors, products.shape[1], *teacher.arguments(), *student.arguments(),
            *numbers, X_SOFTCAP=teacher.softcap != 0.0, Z_SOFTCAP=student.softcap != 0.0, BLOCK=_BLOCK, **kind,
        )  # fmt: skip

    launch(student.products)
