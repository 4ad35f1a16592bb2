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


@on_its_device
def _launch(y: Tensor, kernel: Any, *tensors: Tensor, stride: int) -> None:
    """Launch a kernel over the rows of `y [..., I]`, in blocks of columns of one row."""
    if y.numel():
        size = y.shape[-1]
        block = min(MAX_BLOCK, next_power_of_2(size))
        blocks = cdiv(size, block)
        kernel[(y.numel() // size * blocks,)](*tensors, stride, size, blocks, BLOCK=block, num_warps=NUM_WARPS)


def _gate_and_up(gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return gate and up `[..., I]`: both arguments, or both halves of the first."""
    gate = gate.contiguous()
    if up is None:
        size, odd = divmod(gate.shape[-1], 2)
        if odd:
            raise ValueError(f"gate_up has {gate.shape[-1]} columns; pass an even number, half gate and half up")
        return gate[..., :size], gate[..., size:]
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {gate.dtype} {list(gate.shape)} and up is {up.dtype} {list(up.shape)}; make them agree"
        )
    return gate, up.contiguous()


@torch.library.custom_op("parallel_layers::swiglu", mutates_args=())
def fused_swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return `silu(gate) * up` `[..., I]`. Without `up`, `gate [..., 2I]` is a fused projection: gate, then up.

    Raises:
        ValueError: The fused projection has an odd number of columns, or gate and up differ in shape or dtype.
    """
    halves = _gate_and_up(gate, up)
    y = gate.new_empty(halves[0].shape)
    _launch(y, _swiglu_kernel, *halves, y, stride=gate.shape[-1])
    return y


@fused_swiglu.register_fake
def _(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1)))


@torch.library.custom_op("parallel_layers::swiglu_backward", mutates_args=())
def _backward(dy: Tensor, gate: Tensor, up: Tensor | None) -> list[Tensor]:
    """Return the gradient of each tensor among `gate` and `up`."""
    gradients = _empty_gradients(dy, gate, up)
    tensors = dy.contiguous(), *_gate_and_up(gate, up), *_gate_and_up(*gradients)
    _launch(dy, _swiglu_backward_kernel, *tensors, stride=gate.shape[-1])
    return gradients


def _empty_gradients(dy: Tensor, gate: Tensor, up: Tensor | None) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (gate, up) if x is not None]


def _save_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _backward(dy, *ctx.saved_tensors)
    return *gradients, *(None,) * (2 - len(gradients))


_backward.register_fake(_empty_gradients)
fused_swiglu.register_autograd(_gradients, setup_context=_save_inputs)
