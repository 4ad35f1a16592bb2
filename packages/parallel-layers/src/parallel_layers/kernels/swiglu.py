"""SwiGLU of a fused gate-up projection: one read and one write of memory each way.

    y = silu(g) · u,   silu(g) = g σ(g),   x = [g | u]
    dg = dy · u · σ(g) (1 + g (1 - σ(g))),   du = dy · silu(g)

Backward recomputes σ(g) from x; nothing else is saved. All arithmetic is fp32, rounded once.

Shape legend: R rows (all leading dims), I intermediate size. https://arxiv.org/abs/2002.05202
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, tl, triton

MAX_BLOCK = 1024
NUM_WARPS = 4


def fused_swiglu(gate_up: Tensor) -> Tensor:
    """`gate_up [..., 2I]` (gate, then up) -> `silu(gate) * up` `[..., I]` in the same dtype."""
    return swiglu_op(gate_up)


@triton.jit
def _swiglu_kernel(x_ptr, y_ptr, size, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    x_ptr += row * 2 * size
    gate = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + size + column, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(dy_ptr, x_ptr, dx_ptr, size, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    x_ptr += row * 2 * size
    dx_ptr += row * 2 * size
    gate = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + size + column, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * size + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(dx_ptr + column, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dx_ptr + size + column, (dy * gate * sigmoid).to(dx_ptr.dtype.element_ty), mask=mask)


def _block(size: int, max_block: int) -> int:
    return min(max_block, next_power_of_2(size))


def launch_forward(gate_up: Tensor, *, max_block: int = MAX_BLOCK, num_warps: int = NUM_WARPS) -> Tensor:
    """The forward kernel in blocks of at most `max_block` columns of one row."""
    size, odd = divmod(gate_up.shape[-1], 2)
    if odd:
        raise ValueError(f"gate_up has {gate_up.shape[-1]} columns; gate and up together make an even number")
    gate_up = gate_up.contiguous()
    y = gate_up.new_empty((*gate_up.shape[:-1], size))
    if y.numel():
        block = _block(size, max_block)
        blocks = cdiv(size, block)
        grid = (y.numel() // size * blocks,)
        _swiglu_kernel[grid](gate_up, y, size, blocks, BLOCK=block, num_warps=num_warps)
    return y


def launch_backward(dy: Tensor, gate_up: Tensor, *, max_block: int = MAX_BLOCK, num_warps: int = NUM_WARPS) -> Tensor:
    """The backward kernel in blocks of at most `max_block` columns of one row."""
    gate_up, dy = gate_up.contiguous(), dy.contiguous()
    dx = torch.empty_like(gate_up)
    if dx.numel():
        size = dy.shape[-1]
        block = _block(size, max_block)
        blocks = cdiv(size, block)
        grid = (dy.numel() // size * blocks,)
        _swiglu_backward_kernel[grid](dy, gate_up, dx, size, blocks, BLOCK=block, num_warps=num_warps)
    return dx


@torch.library.custom_op("parallel_layers::swiglu", mutates_args=())
def swiglu_op(gate_up: Tensor) -> Tensor:
    """`fused_swiglu` as an operator."""
    return launch_forward(gate_up)


@swiglu_op.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@torch.library.custom_op("parallel_layers::swiglu_backward", mutates_args=())
def swiglu_backward_op(dy: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of `gate_up`."""
    return launch_backward(dy, gate_up)


@swiglu_backward_op.register_fake
def _(dy: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    return swiglu_backward_op(dy, *ctx.saved_tensors)


swiglu_op.register_autograd(_backward, setup_context=_context)
