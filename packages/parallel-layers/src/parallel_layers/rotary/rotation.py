"""Rotation of queries and keys by cos and sin of their tokens' positions.

Rotary dims have one of two layouts; frequency i rotates the pair

    halves          (x_i, x_{i + D/2})        Llama, Qwen, Mistral, Gemma, gpt-oss
    interleaved     (x_{2i}, x_{2i + 1})      GLM, DeepSeek, Cohere, and the RoFormer paper

Shape legend: T tokens, D rotary dims of a head, N heads, Q query heads, K key heads.
"""

import torch
from torch import Tensor

from parallel_layers.kernels.rotary import check_rotary, fused_rotary, fused_split_and_rotary
from parallel_layers.kernels.runtime import use_triton


def apply_rotary(x_TND: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first D dims of every head and keep the rest.

        (a, b) -> (a cos - b sin, b cos + a sin),   a, b the two halves of the D dims, or its even and odd dims

    Arithmetic is fp32 (fp64 for fp64 input), rounded once to x's dtype. https://arxiv.org/abs/2104.09864

    Args:
        x_TND: Queries or keys `[T, N, head_dim]`.
        cos_TD: `[T, D]` from `RotaryEmbedding`, D <= head_dim, with two equal halves.
        sin_TD: `[T, D]`, like `cos_TD`.
        interleaved: True: pairs are neighbouring dims (GLM, DeepSeek, Cohere). False: pairs are D/2 apart.

    Returns:
        `[T, N, head_dim]` in x's dtype and layout.

    Raises:
        ValueError: cos and sin differ in shape or do not have T rows, or D is odd or larger than head_dim.
    """
    check_rotary(x_TND, x_TND, cos_TD, sin_TD)
    dim = cos_TD.shape[-1]
    wide = torch.promote_types(x_TND.dtype, cos_TD.dtype)
    rotated, unrotated = (x_TND, None) if dim == x_TND.shape[-1] else (x_TND[..., :dim], x_TND[..., dim:])
    rotated = rotated.to(wide)
    if interleaved:
        pairs = rotated.unflatten(-1, (-1, 2))
        cos, sin = cos_TD[:, None, : dim // 2], sin_TD[:, None, : dim // 2]
        a, b = pairs.unbind(-1)
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        out = rotated * cos_TD[:, None] + torch.cat((-b, a), dim=-1) * sin_TD[:, None]
    out = out.to(x_TND.dtype)
    return out if unrotated is None else torch.cat((out, unrotated), dim=-1)


def rotate_queries_and_keys(
    q_TQD: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Apply `apply_rotary` to `[T, Q, head_dim]` and `[T, K, head_dim]`; on CUDA one kernel each way."""
    if use_triton(q_TQD, k_TKD, cos_TD, sin_TD):
        return fused_rotary(q_TQD, k_TKD, cos_TD, sin_TD, interleaved)
    q, k = (apply_rotary(x, cos_TD, sin_TD, interleaved=interleaved) for x in (q_TQD, k_TKD))
    return q, k


def split_and_rotate(
    qkv_TND: Tensor, num_kv_heads: int, cos_TD: Tensor, sin_TD: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split `[T, Q + 2K, head_dim]` into queries, keys and values, and rotate queries and keys; on CUDA one kernel."""
    if use_triton(qkv_TND, cos_TD, sin_TD):
        return fused_split_and_rotary(qkv_TND, num_kv_heads, cos_TD, sin_TD, interleaved)
    q, k, v = qkv_TND.split([qkv_TND.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    return *rotate_queries_and_keys(q, k, cos_TD, sin_TD, interleaved=interleaved), v
