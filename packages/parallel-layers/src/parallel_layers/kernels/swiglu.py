"""SwiGLU of one fused gate-up projection or of two tensors, in one pass over memory each way.

    y = silu(g) · u,   silu(g) = g σ(g),   x = [g | u]
    dg = dy · u · σ(g) (1 + g (1 - σ(g))),   du = dy · silu(g)

Only the inputs are saved; the backward recomputes σ(g). All arithmetic is fp32, rounded once.

Shape legend: R rows (all leading dims), I intermediate size. https://arxiv.org/abs/2002.05202
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton

MAX_BLOCK = 1024
NUM_WARPS = 4


def fused_swiglu(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`: `gate_up [..., 2I]` (gate, then up) -> `[..., I]` in the same dtype."""
    return swiglu_op(gate_up)


def fused_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` `[..., I]`; raise ValueError if the two shapes or dtypes differ."""
    return silu_mul_op(gate, up)


# Rows of gate and up, and of their gradients, are `stride` elements apart: 2I in a fused projection, else I.
@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, y_ptr, stride, size, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, stride, size, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * size + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(dgate_ptr + row * stride + column, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * stride + column, (dy * gate * sigmoid).to(dup_ptr.dtype.element_ty), mask=mask)


def _block(size: int, max_block: int) -> int:
    return min(max_block, next_power_of_2(size))


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    size, odd = divmod(gate_up.shape[-1], 2)
    if odd:
        raise ValueError(f"gate_up has {gate_up.shape[-1]} columns; pass an even number, half gate and half up")
    return gate_up[..., :size], gate_up[..., size:]


@on_its_device
def _forward(gate: Tensor, up: Tensor, stride: int, max_block: int, num_warps: int) -> Tensor:
    y = gate.new_empty(gate.shape)
    if y.numel():
        size = y.shape[-1]
        block = _block(size, max_block)
        blocks = cdiv(size, block)
        grid = (y.numel() // size * blocks,)
        _swiglu_kernel[grid](gate, up, y, stride, size, blocks, BLOCK=block, num_warps=num_warps)
    return y


@on_its_device
def _backward_into(
    dgate: Tensor, dup: Tensor, dy: Tensor, gate: Tensor, up: Tensor, stride: int, max_block: int, num_warps: int
) -> None:
    if dy.numel():
        size = dy.shape[-1]
        block = _block(size, max_block)
        blocks = cdiv(size, block)
        grid = (dy.numel() // size * blocks,)
        _swiglu_backward_kernel[grid](dy, gate, up, dgate, dup, stride, size, blocks, BLOCK=block, num_warps=num_warps)


def launch_forward(gate_up: Tensor, *, max_block: int = MAX_BLOCK, num_warps: int = NUM_WARPS) -> Tensor:
    """Launch the forward kernel in blocks of at most `max_block` columns of one row."""
    gate, up = _halves(gate_up.contiguous())
    return _forward(gate, up, gate_up.shape[-1], max_block, num_warps)


def launch_backward(dy: Tensor, gate_up: Tensor, *, max_block: int = MAX_BLOCK, num_warps: int = NUM_WARPS) -> Tensor:
    """Launch the backward kernel in blocks of at most `max_block` columns of one row."""
    gate_up = gate_up.contiguous()
    dx = torch.empty_like(gate_up)
    _backward_into(*_halves(dx), dy.contiguous(), *_halves(gate_up), gate_up.shape[-1], max_block, num_warps)
    return dx


@torch.library.custom_op("parallel_layers::swiglu", mutates_args=())
def swiglu_op(gate_up: Tensor) -> Tensor:
    """See `fused_swiglu`."""
    return launch_forward(gate_up)


@swiglu_op.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@torch.library.custom_op("parallel_layers::swiglu_backward", mutates_args=())
def swiglu_backward_op(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of `gate_up`."""
    return launch_backward(dy, gate_up)


@swiglu_backward_op.register_fake
def _(dy: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    return swiglu_backward_op(dy, *ctx.saved_tensors)


swiglu_op.register_autograd(_backward, setup_context=_context)


@torch.library.custom_op("parallel_layers::silu_mul", mutates_args=())
def silu_mul_op(gate: Tensor, up: Tensor) -> Tensor:
    """See `fused_silu_mul`."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {gate.dtype} {list(gate.shape)} and up is {up.dtype} {list(up.shape)}; make them agree"
        )
    return _forward(gate.contiguous(), up.contiguous(), gate.shape[-1], MAX_BLOCK, NUM_WARPS)


@silu_mul_op.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("parallel_layers::silu_mul_backward", mutates_args=())
def silu_mul_backward_op(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate` and `up`."""
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _backward_into(
        dgate, dup, dy.contiguous(), gate.contiguous(), up.contiguous(), gate.shape[-1], MAX_BLOCK, NUM_WARPS
    )
    return dgate, dup


@silu_mul_backward_op.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _apart_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return silu_mul_backward_op(dy, *ctx.saved_tensors)


silu_mul_op.register_autograd(_apart_backward, setup_context=_context)
