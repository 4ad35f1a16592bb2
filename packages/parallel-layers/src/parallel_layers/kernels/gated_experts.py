"""The weighted activation of experts' rows, in one pass over memory each way.

    g, u = gate and up of a row (+ its expert's bias),   g' = min(g, limit),   u' = min(max(u, -limit), limit)
    y = w · g' σ(alpha g') (u' + offset)

alpha = 1, limit = inf and offset = 0 are SwiGLU (https://arxiv.org/abs/2002.05202); alpha = 1.702, limit = 7 and
offset = 1 are gpt-oss' activation (https://arxiv.org/abs/2508.10925). Clamped inputs have a gradient of zero.
The inputs are saved, and the backward computes the activation again. All arithmetic is fp32, rounded once.

Shape legend: M rows, I intermediate size, e experts.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import next_power_of_2, on_its_device, tl, triton

_MAX_BLOCK = 1024


class GLU(NamedTuple):
    """The constants of a gated activation, and the layout of its input."""

    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0
    alternating: bool = False
    """The columns of gate and up alternate; else gate, then up."""


@triton.jit
def _gate_and_up(ptr, start, size, ALTERNATING: tl.constexpr, BLOCK: tl.constexpr):
    """Load columns `start` to `start + BLOCK` of gate and of up from a row of 2 `size` columns."""
    if ALTERNATING:
        column = 2 * start + tl.arange(0, 2 * BLOCK)
        pairs = tl.load(ptr + column, mask=column < 2 * size, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(pairs, (BLOCK, 2)))
    else:
        column = start + tl.arange(0, BLOCK)
        gate = tl.load(ptr + column, mask=column < size, other=0.0).to(tl.float32)
        up = tl.load(ptr + size + column, mask=column < size, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _weighted_glu_kernel(
    x_ptr, weights_ptr, bias_ptr, experts_ptr, y_ptr, size, alpha, limit, offset,
    ALTERNATING: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row).to(tl.float32)
    expert = tl.load(experts_ptr + row).to(tl.int64) if HAS_BIAS else 0
    for start in range(0, size, BLOCK):
        gate, up = _gate_and_up(x_ptr + row * 2 * size, start, size, ALTERNATING, BLOCK)
        if HAS_BIAS:
            gate_bias, up_bias = _gate_and_up(bias_ptr + expert * 2 * size, start, size, ALTERNATING, BLOCK)
            gate, up = gate + gate_bias, up + up_bias
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + offset
        y = weight * gate * tl.sigmoid(alpha * gate) * up
        column = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=column < size)


@triton.jit
def _weighted_glu_backward_kernel(
    dy_ptr, x_ptr, weights_ptr, bias_ptr, experts_ptr, dx_ptr, dweights_ptr, size, alpha, limit, offset,
    ALTERNATING: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row).to(tl.float32)
    expert = tl.load(experts_ptr + row).to(tl.int64) if HAS_BIAS else 0
    dweights = tl.zeros((BLOCK,), dtype=tl.float32)
    dx_ptr += row * 2 * size
    for start in range(0, size, BLOCK):
        gate_in, up_in = _gate_and_up(x_ptr + row * 2 * size, start, size, ALTERNATING, BLOCK)
        if HAS_BIAS:
            gate_bias, up_bias = _gate_and_up(bias_ptr + expert * 2 * size, start, size, ALTERNATING, BLOCK)
            gate_in, up_in = gate_in + gate_bias, up_in + up_bias
        column = start + tl.arange(0, BLOCK)
        mask = column < size
        dy = tl.load(dy_ptr + row * size + column, mask=mask, other=0.0).to(tl.float32)
        gate = tl.minimum(gate_in, limit)
        up = tl.minimum(tl.maximum(up_in, -limit), limit) + offset
        sigmoid = tl.sigmoid(alpha * gate)
        dweights += dy * gate * sigmoid * up
        dy *= weight
        dgate = tl.where(gate_in <= limit, dy * up * sigmoid * (1.0 + alpha * gate * (1.0 - sigmoid)), 0.0)
        dup = tl.where((up_in <= limit) & (up_in >= -limit), dy * gate * sigmoid, 0.0)
        if ALTERNATING:
            pairs = tl.reshape(tl.join(dgate, dup), (2 * BLOCK,))
            column = 2 * start + tl.arange(0, 2 * BLOCK)
            tl.store(dx_ptr + column, pairs.to(dx_ptr.dtype.element_ty), mask=column < 2 * size)
        else:
            tl.store(dx_ptr + column, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
            tl.store(dx_ptr + size + column, dup.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dweights_ptr + row, tl.sum(dweights).to(dweights_ptr.dtype.element_ty))


@on_its_device
def _launch(rows: Tensor, kernel: Any, *tensors: Tensor, glu: GLU, biased: bool) -> None:
    """Launch a kernel with one program for each row of `rows [M, I]`."""
    if rows.numel():
        size = rows.shape[1]
        block = min(_MAX_BLOCK, next_power_of_2(size))
        kernel[(len(rows),)](
            *tensors, size, glu.alpha, glu.limit, glu.offset,
            ALTERNATING=glu.alternating, HAS_BIAS=biased, BLOCK=block, num_warps=4,
        )  # fmt: skip


@torch.library.custom_op("parallel_layers::weighted_glu", mutates_args=())
def _forward(
    gate_up: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    experts: Tensor | None,
    alpha: float,
    limit: float,
    offset: float,
    alternating: bool,
) -> Tensor:
    gate_up, weights = gate_up.contiguous(), weights.contiguous()
    y = _empty_output(gate_up, weights, bias, experts, alpha, limit, offset, alternating)
    # The kernel without a bias reads neither of the two.
    by_expert = (gate_up, gate_up) if bias is None or experts is None else (bias.contiguous(), experts.contiguous())
    glu = GLU(alpha, limit, offset, alternating)
    _launch(y, _weighted_glu_kernel, gate_up, weights, *by_expert, y, glu=glu, biased=bias is not None)
    return y


@_forward.register_fake
def _empty_output(gate_up: Tensor, *_: Any) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.custom_op("parallel_layers::weighted_glu_backward", mutates_args=())
def _backward(
    dy: Tensor,
    gate_up: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    experts: Tensor | None,
    alpha: float,
    limit: float,
    offset: float,
    alternating: bool,
) -> tuple[Tensor, Tensor]:
    dy, gate_up, weights = dy.contiguous(), gate_up.contiguous(), weights.contiguous()
    dx, dweights = torch.empty_like(gate_up), torch.empty_like(weights)
    by_expert = (gate_up, gate_up) if bias is None or experts is None else (bias.contiguous(), experts.contiguous())
    tensors = (dy, gate_up, weights, *by_expert, dx, dweights)
    _launch(
        dy, _weighted_glu_backward_kernel, *tensors, glu=GLU(alpha, limit, offset, alternating), biased=bias is not None
    )
    return dx, dweights


@_backward.register_fake
def _(dy: Tensor, gate_up: Tensor, weights: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), weights.new_empty(weights.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.glu = inputs[4:]


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gate_up, weights, bias, experts = ctx.saved_tensors
    dx, dweights = _backward(dy, gate_up, weights, bias, experts, *ctx.glu)
    dbias = None
    if bias is not None and ctx.needs_input_grad[2]:
        # A GEMM sums in fp32 and in a fixed order.
        is_expert = experts == torch.arange(len(bias), device=experts.device)[:, None]
        dbias = is_expert.to(dx.dtype) @ dx
    return dx, dweights, dbias, *(None,) * 5


_forward.register_autograd(_gradients, setup_context=_save)


def weighted_glu(
    gate_up_M2I: Tensor,
    weights_M: Tensor,
    glu: GLU = GLU(),  # noqa: B008
    *,
    bias_e2I: Tensor | None = None,
    experts_M: Tensor | None = None,
) -> Tensor:
    """Return each row's weight times its gated activation, `[M, 2I]` and `[M]` -> `[M, I]`, in gate_up's dtype.

    With `bias_e2I` the row's expert `experts_M` (integers) has a bias. Gradients: gate_up, weights and bias.
    """
    return _forward(gate_up_M2I, weights_M, bias_e2I, experts_M, *glu)
