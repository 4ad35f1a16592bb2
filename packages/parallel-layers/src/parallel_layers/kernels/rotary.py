"""Rotary embedding of queries and keys in one kernel, from each token's own cos and sin.

    (a, b) -> (a cos - b sin, b cos + a sin),   a, b the two halves of the D rotary dims of a head, or its even and
                                                odd dims (interleaved)

Dims past D are copied. Packed positions cost nothing: cos and sin are rows per token. The map is orthogonal up to its
scale, so backward is the same kernel with -sin, and nothing but cos and sin is saved. Arithmetic is fp32, rounded once.

Shape legend: T tokens, Q query heads, K key heads, D rotary dims. https://arxiv.org/abs/2104.09864
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, tl, triton

HEADS = 8
NUM_WARPS = 4


def fused_rotary(
    q_TQD: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their tokens' angles.

    Args:
        q_TQD: `[T, Q, head_dim]`; heads may be strided (a slice of a fused projection), dims not.
        k_TKD: `[T, K, head_dim]`, likewise.
        cos_TD: `[T, D]` fp32 from `RotaryEmbedding`, D <= head_dim; its two halves are equal, the first is read.
        sin_TD: `[T, D]`, likewise.
        interleaved: Pairs are neighbouring dims; False: they are D/2 apart.

    Returns:
        The rotated queries and keys, contiguous, in their own dtype.
    """
    return rotary_op(q_TQD, k_TKD, cos_TD, sin_TD, interleaved, False)


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    cos,
    sin,
    heads,
    first,
    x_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate heads first..first+HEADS of one token; `x_ptr` and `out_ptr` are at that token."""
    head = first + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < heads) & (dim < HALF)
    first_of_pair = 2 * dim if INTERLEAVED else dim
    to_second = 1 if INTERLEAVED else HALF
    source = x_ptr + head * x_stride + first_of_pair
    target = out_ptr + head * HEAD_DIM + first_of_pair
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + to_second, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + to_second, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        dim = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = (head < heads) & (dim < HEAD_DIM)
        rest = tl.load(x_ptr + head * x_stride + dim, mask=mask, other=0.0)
        tl.store(out_ptr + head * HEAD_DIM + dim, rest, mask=mask)


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_heads,
    k_heads,
    q_blocks,
    blocks,
    q_token,
    q_head,
    k_token,
    k_head,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(cos_ptr + token * 2 * HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * 2 * HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    if block < q_blocks:
        _rotate(
            q_ptr + token * q_token,
            q_out_ptr + token * q_heads * HEAD_DIM,
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
        )
    else:
        _rotate(
            k_ptr + token * k_token,
            k_out_ptr + token * k_heads * HEAD_DIM,
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
        )


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    tokens, head_dim = q.shape[0], q.shape[-1]
    if q.dim() != 3 or k.dim() != 3 or k.shape[0] != tokens or k.shape[-1] != head_dim:
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)} must be [T, heads, head_dim] with equal T and head_dim"
        )
    if cos.shape != sin.shape or cos.shape[0] != tokens or cos.shape[1] % 2 or cos.shape[1] > head_dim:
        raise ValueError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} must be [{tokens}, D] with one even D <= {head_dim}"
        )


def launch(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    inverse: bool,
    *,
    heads: int = HEADS,
    num_warps: int = NUM_WARPS,
) -> tuple[Tensor, Tensor]:
    """The kernel, with at most `heads` heads of one token a program."""
    _check(q, k, cos, sin)
    q = q if q.stride(-1) == 1 else q.contiguous()
    k = k if k.stride(-1) == 1 else k.contiguous()
    (tokens, q_heads, head_dim), k_heads, dims = q.shape, k.shape[1], cos.shape[1]
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    heads = min(heads, next_power_of_2(max(q_heads, k_heads)))
    q_blocks, k_blocks = cdiv(q_heads, heads), cdiv(k_heads, heads)
    if grid := tokens * (q_blocks + k_blocks):
        _rotary_kernel[(grid,)](
            q,
            k,
            cos.contiguous(),
            sin.contiguous(),
            q_out,
            k_out,
            q_heads,
            k_heads,
            q_blocks,
            q_blocks + k_blocks,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            HEAD_DIM=head_dim,
            HALF=dims // 2,
            BLOCK_HALF=next_power_of_2(dims // 2),
            BLOCK_REST=0 if dims == head_dim else next_power_of_2(head_dim - dims),
            HEADS=heads,
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            num_warps=num_warps,
        )
    return q_out, k_out


@torch.library.custom_op("parallel_layers::rotary", mutates_args=())
def rotary_op(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    """`fused_rotary` as an operator; `inverse` turns the other way."""
    return launch(q, k, cos, sin, interleaved, inverse)


@rotary_op.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    dq, dk = rotary_op(dq, dk, cos, sin, ctx.interleaved, not ctx.inverse)
    return dq, dk, None, None, None, None


rotary_op.register_autograd(_backward, setup_context=_context)
