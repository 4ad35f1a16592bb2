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
    return _norm_and_stream(x, None, weight, eps, unit_offset)[0]


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `(norm(x + residual), x + residual)`, both `[..., H]`; the sum is rounded to x's dtype before the norm."""
    return _norm_and_stream(x, residual, weight, eps, unit_offset)


def fused_rms_norm_and_keep(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `(norm(x), x)`, both `[..., H]`; the backward adds the gradients of both in one kernel."""
    return _norm_and_stream(x, None, weight, eps, unit_offset)


def _norm_and_stream(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """Return the norm and the residual stream, which is x or x + residual."""
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


@torch.library.custom_op("parallel_layers::rms_norm", mutates_args=())
def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm, x + residual (without a residual an empty tensor) and ρ."""
    launch = forward_launch(x.shape[-1], residual=residual is not None)
    normed, total, rstd = launch_forward(x, residual, weight, eps, unit_offset, launch)
    return normed, x.new_empty(0) if total is None else total, rstd


@_forward.register_fake
def _(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape), total, x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("parallel_layers::rms_norm_backward", mutates_args=())
def _backward(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, rstd: Tensor, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the residual stream and of the weight; `dstream` is the stream's own gradient."""
    launch = backward_launch(stream.shape[-1], stream.element_size(), stream.device)
    return launch_backward(dy, dstream, stream, weight, rstd, unit_offset, launch)


@_backward.register_fake
def _(dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return stream.new_empty(stream.shape), torch.empty_like(weight, memory_format=torch.contiguous_format)
