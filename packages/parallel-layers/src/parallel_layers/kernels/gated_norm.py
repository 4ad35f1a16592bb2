"""RMSNorm of a recurrence's outputs with a gate, in one kernel each way.

    the gate first (Mamba-2):    u = x · a(z),   y = u ρ · w
    the norm first:              u = x,          y = u ρ · w · a(z)

    ρ = 1 / sqrt(mean(u²) + eps), a = silu or sigmoid
    e = dy, or with the norm first dy · a(z);   dw = Σ e û, û = u ρ;   du = ρ (g - û mean(g û)), g = e · w
    the gate first:   dx = du · a(z),   dz = du · x · a'(z);      the norm first:   dx = du,   dz = dy · û w · a'(z)

Only the inputs are saved; the backward computes ρ again. Arithmetic is fp32. The norm first is rounded before the gate,
as in models of transformers. Each program of the backward sums its part of dw; the parts are summed in a fixed order.

Shape legend: T tokens, G groups of channels or heads, S size of a group. https://arxiv.org/abs/1910.07467
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
    tl,
    triton,
    use_triton,
)

MAX_SIZE = 8192
"""Largest S: a program holds whole rows of three tensors in registers."""

_TILE = 2048
_PROGRAMS = 8  # for each multiprocessor


def supports_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Return True if the kernels can run on these tensors."""
    return use_triton(x, gate, weight) and x.dtype == gate.dtype and x.shape[-1] <= MAX_SIZE


@triton.jit
def _load(ptr, row, group, stride, group_stride, column, mask):
    return tl.load(ptr + row[:, None] * stride + group * group_stride + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, tokens, groups, eps, x_stride, x_group, gate_stride, gate_group, weight_group,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GATE_FIRST: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    group, column = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < tokens)[:, None] & (column < SIZE)
    weight = tl.load(weight_ptr + group * weight_group + column, mask=column < SIZE, other=0.0).to(tl.float32)
    x = _load(x_ptr, row, group, x_stride, x_group, column, mask)
    gate = _load(gate_ptr, row, group, gate_stride, gate_group, column, mask)
    factor = tl.sigmoid(gate)
    if SILU:
        factor *= gate
    if GATE_FIRST:
        x *= factor
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None] * weight
    if not GATE_FIRST:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32) * factor
    tl.store(y_ptr + (row * groups + group)[:, None] * SIZE + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, dx_ptr, dgate_ptr, dweight_ptr, tokens, groups, eps,
    x_stride, x_group, gate_stride, gate_group, weight_group,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GATE_FIRST: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    group, column = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + group * weight_group + column, mask=column < SIZE, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < tokens)[:, None] & (column < SIZE)
        dense = (row * groups + group)[:, None] * SIZE + column
        x = _load(x_ptr, row, group, x_stride, x_group, column, mask)
        gate = _load(gate_ptr, row, group, gate_stride, gate_group, column, mask)
        dy = tl.load(dy_ptr + dense, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        factor, slope = sigmoid, sigmoid * (1.0 - sigmoid)
        if SILU:
            slope = sigmoid + gate * slope
            factor *= gate
        unit = x * factor if GATE_FIRST else x
        rstd = tl.rsqrt(tl.sum(unit * unit, axis=1) / SIZE + eps)[:, None]
        unit *= rstd
        upstream = dy if GATE_FIRST else dy * factor
        dweight += upstream * unit
        dnormed = upstream * weight
        dx = rstd * (dnormed - unit * (tl.sum(dnormed * unit, axis=1) / SIZE)[:, None])
        if GATE_FIRST:
            dgate = dx * x * slope
            dx *= factor
        else:
            dgate = dy * (unit * weight).to(x_ptr.dtype.element_ty).to(tl.float32) * slope
        tl.store(dx_ptr + dense, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dgate_ptr + dense, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    part = (tl.program_id(0) * groups + group) * SIZE + column
    tl.store(dweight_ptr + part, tl.sum(dweight, axis=0)[None, :], mask=column < SIZE)


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """Return `x [T, G, S]` with the numbers of a group side by side, and its first two strides."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.stride(0), x.stride(1)


@torch.library.custom_op("parallel_layers::gated_rms_norm", mutates_args=())
@on_its_device
def fused_gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool, silu: bool = True
) -> Tensor:
    """Return the norm of each group of x with the gate, `[T, G, S]` in x's dtype.

    Args:
        x: `[T, G, S]`; tokens and groups can be apart.
        gate: `[T, G, S]` of x's dtype, likewise.
        weight: `[G, S]`, or `[S]` for all groups.
        eps: Added to the mean square.
        gate_first: Apply the gate before the norm (else: after it).
        silu: The activation of the gate is SiLU (else: sigmoid).

    Raises:
        ValueError: Shapes or dtypes disagree, or S is above `MAX_SIZE`.
    """
    fits = x.shape == gate.shape and x.dtype == gate.dtype and weight.shape in (x.shape[1:], x.shape[2:])
    if x.dim() != 3 or not fits or x.shape[-1] > MAX_SIZE:
        shapes = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (x, gate, weight))
        raise ValueError(
            f"x, gate and weight are {shapes}; x and gate must be alike [T, G, S] with S up to {MAX_SIZE}, and the "
            "weight [G, S] or [S]"
        )
    (tokens, groups, size), y = x.shape, x.new_empty(x.shape)
    if y.numel():
        (x, *x_strides), (gate, *gate_strides) = _rows(x), _rows(gate)
        sizes = _sizes(size)
        _forward_kernel[(cdiv(tokens, sizes["ROWS"]), groups)](
            x, gate, weight.contiguous(), y, tokens, groups, eps, *x_strides, *gate_strides,
            size if weight.dim() == 2 else 0, **sizes, GATE_FIRST=gate_first, SILU=silu,
        )  # fmt: skip
    return y


@torch.library.custom_op("parallel_layers::gated_rms_norm_backward", mutates_args=())
@on_its_device
def _backward(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, the gate and the weight."""
    dx, dgate, dweight = _empty_gradients(dy, x, gate, weight, eps, gate_first, silu)
    if not dx.numel():
        return dx, dgate, dweight.zero_()
    tokens, groups, size = x.shape
    (x, *x_strides), (gate, *gate_strides), sizes = _rows(x), _rows(gate), _sizes(size)
    programs = min(cdiv(tokens, sizes["ROWS"]), cdiv(_PROGRAMS * num_multiprocessors(x.device), groups))
    parts = torch.empty(programs, groups, size, dtype=torch.float32, device=x.device)
    _backward_kernel[(programs, groups)](
        dy.contiguous(), x, gate, weight.contiguous(), dx, dgate, parts, tokens, groups, eps,
        *x_strides, *gate_strides, size if weight.dim() == 2 else 0, **sizes, GATE_FIRST=gate_first, SILU=silu,
    )  # fmt: skip
    return dx, dgate, dweight.copy_(parts.sum(0) if weight.dim() == 2 else parts.flatten(0, 1).sum(0))


def _sizes(size: int) -> dict[str, int]:
    block = next_power_of_2(size)
    rows = max(1, min(16, _TILE // block))
    return {"SIZE": size, "BLOCK": block, "ROWS": rows, "num_warps": 4 if block <= 2048 else 8}


def _empty_gradients(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), gate.new_empty(x.shape), weight.new_empty(weight.shape)


@fused_gated_rms_norm.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool, silu: bool = True) -> Tensor:
    return x.new_empty(x.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps, ctx.gate_first, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(dy, *ctx.saved_tensors, ctx.eps, ctx.gate_first, ctx.silu), None, None, None


_backward.register_fake(_empty_gradients)
fused_gated_rms_norm.register_autograd(_gradients, setup_context=_save_inputs)
