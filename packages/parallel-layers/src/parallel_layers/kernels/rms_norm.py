"""RMSNorm with an optional residual addition, in one kernel each way.

    s = x + r                       (rounded to x's dtype: s is the residual stream)
    y = s · ρ · w,                  ρ = 1 / sqrt(mean(s²) + eps)
    ds = ρ (g - ŝ mean(g ŝ)) + ds', g = dy · w, ŝ = s ρ, ds' the gradient of the residual stream
    dw = Σ_rows dy ŝ

Forward reads x, r, w and writes y, s and ρ (fp32, one per row). Backward reads dy, ds', s, w, ρ and writes ds, which is
the gradient of both x and r. Shape legend: H normalised size. https://arxiv.org/abs/1910.07467
"""

from typing import Any

import torch
from torch import Tensor

from parallel_layers.kernels.rms_norm_triton import (
    MAX_SIZE,
    backward_launch,
    forward_launch,
    launch_backward,
    launch_forward,
)
from parallel_layers.kernels.runtime import use_triton


def supports_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> bool:
    """Return True if the kernels can run on these tensors. Under autocast a residual can have a wider dtype than x."""
    alike = residual is None or (residual.dtype == x.dtype and residual.shape == x.shape)
    return alike and use_triton(x, weight, residual) and x.shape[-1] <= MAX_SIZE


def fused_rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, unit_offset: bool = False) -> Tensor:
    """Normalise the last dim: `x [..., H]`, `weight [H]` -> `[..., H]` in x's dtype.

    `unit_offset` multiplies by 1 + weight. A strided `[T, N, H]` (heads of a fused projection) is read in place.
    """
    return rms_norm_op(x, weight, eps, unit_offset)[0]


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `(norm(x + residual), x + residual)`, both `[..., H]`; the sum is rounded to x's dtype before the norm."""
    normed, total, _ = add_rms_norm_op(x, residual, weight, eps, unit_offset)
    return normed, total


def fused_rms_norm_and_keep(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `(norm(x), x)`, both `[..., H]`; the backward adds the gradients of both in one kernel."""
    normed, kept = _NormAndKeep.apply(x, weight, eps, unit_offset)
    return normed, kept


@torch.library.custom_op("parallel_layers::rms_norm", mutates_args=())
def rms_norm_op(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor]:
    """Return `(normed, rstd)`; see `fused_rms_norm`."""
    normed, _, rstd = launch_forward(x, None, weight, eps, unit_offset, forward_launch(x.shape[-1], residual=False))
    return normed, rstd


@rms_norm_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("parallel_layers::add_rms_norm", mutates_args=())
def add_rms_norm_op(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(normed, total, rstd)`; see `fused_add_rms_norm`."""
    launch = forward_launch(x.shape[-1], residual=True)
    normed, total, rstd = launch_forward(x, residual, weight, eps, unit_offset, launch)
    assert total is not None
    return normed, total, rstd


@add_rms_norm_op.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("parallel_layers::rms_norm_backward", mutates_args=())
def rms_norm_backward_op(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """Return `(dx, dweight)` for the normalised tensor x and the gradient `dtotal` of the residual stream."""
    return launch_backward(
        dy, dtotal, x, weight, rstd, unit_offset, backward_launch(x.shape[-1], x.element_size(), x.device)
    )


@rms_norm_backward_op.register_fake
def _(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight, memory_format=torch.contiguous_format)


def _norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.unit_offset = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _norm_backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None, None]:
    if dy is None:
        return None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = rms_norm_backward_op(dy, None, x, weight, rstd, ctx.unit_offset)
    return dx, dweight, None, None


def _add_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, weight, _, ctx.unit_offset = inputs
    _, total, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(total, weight, rstd)


def _add_backward(
    ctx: Any, dy: Tensor | None, dtotal: Tensor | None, _: None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    if dy is None:
        return dtotal, dtotal, None, None, None
    total, weight, rstd = ctx.saved_tensors
    dx, dweight = rms_norm_backward_op(dy, dtotal, total, weight, rstd, ctx.unit_offset)
    return dx, dx, dweight, None, None


rms_norm_op.register_autograd(_norm_backward, setup_context=_norm_context)
add_rms_norm_op.register_autograd(_add_backward, setup_context=_add_context)


class _NormAndKeep(torch.autograd.Function):
    """An autograd function, because an operator cannot return a view of its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor]:
        normed, rstd = rms_norm_op(x, weight, eps, unit_offset)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, rstd)
        ctx.unit_offset = unit_offset
        return normed, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dkept: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dkept, None, None, None
        x, weight, rstd = ctx.saved_tensors
        return *rms_norm_backward_op(dy, dkept, x, weight, rstd, ctx.unit_offset), None, None
