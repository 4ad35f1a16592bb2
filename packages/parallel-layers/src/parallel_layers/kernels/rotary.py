"""The rotation of `parallel_layers.rotary.apply_rotary` for queries and keys in one kernel.

Dims past D are copied. The backward is the inverse rotation by the same kernel; only cos and sin are saved. Arithmetic
is fp32, rounded once. Tensors may be strided; results are contiguous. The same kernel splits a fused projection into
queries, keys and values (copied), and assembles its gradient in the backward.

Shape legend: T tokens, Q query heads, K key heads and K value heads, D rotary dims.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton

HEADS = 8  # maximum number of heads of one token in a program
NUM_WARPS = 4


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    cos,
    sin,
    heads,
    first_head,
    x_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Rotate heads first..first+HEADS of one token; `x_ptr` and `out_ptr` are at that token.

    The inverse swaps a and b instead of negating sin: the loads of a and b then need not wait for sin.
    """
    head = (first_head + tl.arange(0, HEADS)).to(tl.int64)[:, None]  # heads may be T x D elements apart
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < heads) & (dim < HALF)
    pair = 2 * dim if INTERLEAVED else dim
    distance = 1 if INTERLEAVED else HALF
    at_a = pair + distance if INVERSE else pair
    at_b = pair if INVERSE else pair + distance
    source = x_ptr + head * x_stride
    target = out_ptr + head * HEAD_DIM
    a = tl.load(source + at_a, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + at_b, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + at_a, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + at_b, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        dim = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = (head < heads) & (dim < HEAD_DIM)
        unrotated = tl.load(x_ptr + head * x_stride + dim, mask=mask, other=0.0)
        tl.store(out_ptr + head * HEAD_DIM + dim, unrotated, mask=mask)


@triton.jit
def _copy(x_ptr, out_ptr, heads, begin, x_stride, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, HEADS: tl.constexpr):
    """Copy heads first..first+HEADS of one token; `x_ptr` and `out_ptr` are at that token."""
    head = (begin + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (head < heads) & (dim < HEAD_DIM)
    tl.store(out_ptr + head * HEAD_DIM + dim, tl.load(x_ptr + head * x_stride + dim, mask=mask, other=0.0), mask=mask)


@triton.jit
def _rotary_kernel(
    q_ptr,
    q_token,
    q_head,
    q_out_ptr,
    q_out_token,
    k_ptr,
    k_token,
    k_head,
    k_out_ptr,
    k_out_token,
    v_ptr,
    v_token,
    v_head,
    v_out_ptr,
    v_out_token,
    cos_ptr,
    sin_ptr,
    q_heads,
    k_heads,
    q_blocks,
    k_blocks,
    blocks,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(cos_ptr + token * 2 * HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * 2 * HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    if block < q_blocks:
        _rotate(
            q_ptr + token * q_token,
            q_out_ptr + token * q_out_token,
            cos,
            sin,
            q_heads,
            block * HEADS,
            q_head,
            HEAD_DIM,
            HALF,
            BLOCK_HALF,
            BLOCK_REST,
            HEADS,
            INTERLEAVED,
            INVERSE,
        )
    elif block < q_blocks + k_blocks:
        _rotate(
            k_ptr + token * k_token,
            k_out_ptr + token * k_out_token,
            cos,
            sin,
            k_heads,
            (block - q_blocks) * HEADS,
            k_head,
            HEAD_DIM,
            HALF,
            BLOCK_HALF,
            BLOCK_REST,
            HEADS,
            INTERLEAVED,
            INVERSE,
        )
    elif v_ptr is not None:
        _copy(
            v_ptr + token * v_token,
            v_out_ptr + token * v_out_token,
            k_heads,
            (block - q_blocks - k_blocks) * HEADS,
            v_head,
            HEAD_DIM,
            BLOCK_DIM,
            HEADS,
        )


def check_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError if the shapes of queries, keys, cos and sin do not match."""
    tokens, head_dim = q.shape[0], q.shape[-1]
    if q.dim() != 3 or k.dim() != 3 or k.shape[0] != tokens or k.shape[-1] != head_dim:
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)} must be [T, heads, head_dim] with equal T and head_dim"
        )
    fits = cos.dim() == 2 and cos.shape[0] == tokens and cos.shape[1] % 2 == 0 and cos.shape[1] <= head_dim
    if cos.shape != sin.shape or not fits:
        raise ValueError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} must be [{tokens}, D] with one even D <= {head_dim}"
        )


def _in_and_out(x: Tensor | None, out: Tensor | None) -> tuple[Tensor | None, int, int, Tensor | None, int]:
    """Return a tensor, its strides of tokens and heads, its result and the result's stride of tokens."""
    if x is None or out is None:
        return None, 0, 0, None, 0
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.stride(0), x.stride(1), out, out.stride(0)


@on_its_device
def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    outs: tuple[Tensor, Tensor, Tensor | None],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    inverse: bool,
) -> None:
    """Rotate `q` and `k` into the first two of `outs`, and copy `v` into the third."""
    check_rotary(q, k, cos, sin)
    (tokens, q_heads, head_dim), k_heads, dims = q.shape, k.shape[1], cos.shape[1]
    heads = min(HEADS, next_power_of_2(max(q_heads, k_heads)))
    q_blocks, k_blocks = cdiv(q_heads, heads), cdiv(k_heads, heads)
    blocks = q_blocks + k_blocks * (1 if v is None else 2)
    if grid := tokens * blocks:
        _rotary_kernel[(grid,)](
            *_in_and_out(q, outs[0]),
            *_in_and_out(k, outs[1]),
            *_in_and_out(v, outs[2]),
            cos.contiguous(),
            sin.contiguous(),
            q_heads,
            k_heads,
            q_blocks,
            k_blocks,
            blocks,
            HEAD_DIM=head_dim,
            HALF=dims // 2,
            BLOCK_HALF=next_power_of_2(dims // 2),
            BLOCK_REST=0 if dims == head_dim else next_power_of_2(head_dim - dims),
            BLOCK_DIM=next_power_of_2(head_dim),
            HEADS=heads,
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            num_warps=NUM_WARPS,
        )


@torch.library.custom_op("parallel_layers::rotary", mutates_args=())
def fused_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries `[T, Q, head_dim]` and keys `[T, K, head_dim]`; `inverse` rotates by the negative angles.

    cos and sin are `[T, D]` fp32 with two equal halves; the first is read.
    """
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    _launch(q, k, None, (q_out, k_out, None), cos, sin, interleaved, inverse)
    return q_out, k_out


@fused_rotary.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.custom_op("parallel_layers::split_rotary", mutates_args=())
def fused_split_and_rotary(
    qkv: Tensor, num_kv_heads: int, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split `[T, Q + 2K, head_dim]` into rotated queries, rotated keys and values, each in its own memory."""
    outs = _empty_qkv(qkv, num_kv_heads)
    _launch(*_split_qkv(qkv, num_kv_heads), outs, cos, sin, interleaved, False)
    return outs


def _split_qkv(qkv: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split([qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def _empty_qkv(qkv: Tensor, num_kv_heads: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(x.shape) for x in _split_qkv(qkv, num_kv_heads))
    return q, k, v


@torch.library.custom_op("parallel_layers::split_rotary_backward", mutates_args=())
def _split_rotary_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    d_qkv = _empty_together(dq, dk)
    _launch(dq, dk, dv, _split_qkv(d_qkv, dk.shape[1]), cos, sin, interleaved, True)
    return d_qkv


def _empty_together(dq: Tensor, dk: Tensor, *_: Any) -> Tensor:
    return dq.new_empty(dq.shape[0], dq.shape[1] + 2 * dk.shape[1], dq.shape[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, cos, sin, *ctx.options = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    interleaved, inverse = ctx.options
    return *fused_rotary(dq, dk, *ctx.saved_tensors, interleaved, not inverse), None, None, None, None


def _split_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    return _split_rotary_backward(*gradients, *ctx.saved_tensors, *ctx.options), None, None, None, None


fused_rotary.register_autograd(_backward, setup_context=_save)
fused_split_and_rotary.register_fake(_empty_qkv)
_split_rotary_backward.register_fake(_empty_together)
fused_split_and_rotary.register_autograd(_split_backward, setup_context=_save)
