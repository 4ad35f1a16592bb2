"""Attention of one new token of each sequence to the keys and values in the blocks of a pool, in one pass over them.

A program takes a sequence, a key-value head and the query heads that read the head. It writes the new key and value to
the pool and walks the sequence's keys with an online softmax (https://arxiv.org/abs/1805.02867). Where sequences are
few, several programs share the keys of each, and a second kernel merges their parts.

Shape legend: N sequences, Q query heads, K key-value heads, D head size, D' size of a value head, P blocks of the pool,
b tokens of a block, B blocks of a sequence.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from parallel_layers.kernels.float8 import FLOAT8, scale_of
from parallel_layers.kernels.runtime import (
    cdiv,
    next_power_of_2,
    num_multiprocessors,
    on_its_device,
    tl,
    triton,
    use_triton,
)

_TILE = 64
_MOST_SPLITS = 16
_PROGRAMS_PER_SM = 4


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, lengths_ptr, sinks_ptr,
    out_ptr, parts_ptr, stats_ptr, kv_heads, group, q_stride, k_stride, v_stride, table_stride, head_dim, value_dim,
    value_row, scale, softcap, window,
    PAGE: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, OWN_VALUES: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    group_tiles = tl.cdiv(group, GROUP)
    kv_head, group_tile, split = tl.program_id(1) // group_tiles, tl.program_id(1) % group_tiles, tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    table_ptr += sequence * table_stride

    in_group = group_tile * GROUP + tl.arange(0, GROUP)
    heads = kv_head * group + in_group
    dims, value_dims = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    dim_mask, value_mask = dims < head_dim, value_dims < value_dim
    head_mask = in_group < group
    q = tl.load(
        q_ptr + sequence * q_stride + heads[:, None] * head_dim + dims[None, :],
        mask=head_mask[:, None] & dim_mask[None, :], other=0.0,
    )  # fmt: skip
    new_k = tl.load(k_ptr + sequence * k_stride + kv_head * head_dim + dims, mask=dim_mask, other=0.0)
    new_v = tl.load(v_ptr + sequence * v_stride + kv_head * value_row + value_dims, mask=value_mask, other=0.0)

    # The last split begins with the new token, which no program reads from the pool.
    score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
    if SOFTCAP:
        score = _capped(score, softcap)
    begins = split == SPLITS - 1
    highest = tl.where(begins, score, -1e38)
    total = tl.where(begins, 1.0, 0.0) + tl.zeros((GROUP,), tl.float32)
    out = tl.where(begins, 1.0, 0.0) * new_v.to(tl.float32)[None, :] + tl.zeros((GROUP, VALUE_DIM), tl.float32)
    if begins & (group_tile == 0):
        row = (tl.load(table_ptr + length // PAGE).to(tl.int64) * kv_heads + kv_head) * PAGE + length % PAGE
        _store(keys_ptr + row * head_dim + dims, key_scales_ptr, row, new_k, dim_mask, FLOAT8)
        if OWN_VALUES:
            _store(values_ptr + row * value_row + value_dims, value_scales_ptr, row, new_v, value_mask, FLOAT8)

    first_tile = 0
    if WINDOW:
        first_tile = tl.maximum(length + 1 - window, 0) // TILE
    tiles = tl.cdiv(length, TILE)
    share = tl.cdiv(tiles - first_tile, SPLITS)
    start = first_tile + split * share
    for tile in range(start, tl.minimum(start + share, tiles)):
        position = tile * TILE + tl.arange(0, TILE)
        visible = position < length
        if WINDOW:
            visible = visible & (position > length - window)
        page = tl.load(table_ptr + tile * TILE // PAGE).to(tl.int64)
        row = (page * kv_heads + kv_head) * PAGE + position % PAGE
        k = tl.load(keys_ptr + row[:, None] * head_dim + dims[None, :], mask=dim_mask[None, :], other=0.0)
        v = tl.load(
            values_ptr + row[:, None] * value_row + value_dims[None, :],
            mask=visible[:, None] & value_mask[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if FLOAT8:
            scores *= tl.load(key_scales_ptr + row, mask=visible, other=0.0)[None, :]
        if SOFTCAP:
            scores = _capped(scores, softcap)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        if FLOAT8:
            weights *= tl.load(value_scales_ptr + row, mask=visible, other=0.0)[None, :]
        out = out * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        highest = higher

    flat = sequence * kv_heads * group + heads
    if SPLITS == 1:
        if SINKS:
            total += tl.exp(tl.load(sinks_ptr + heads, mask=head_mask, other=0.0).to(tl.float32) - highest)
        out = out / total[:, None]
        tl.store(
            out_ptr + flat[:, None] * value_dim + value_dims[None, :], out.to(out_ptr.dtype.element_ty),
            mask=head_mask[:, None] & value_mask[None, :],
        )  # fmt: skip
    else:
        address = flat * SPLITS + split
        tl.store(
            parts_ptr + address[:, None] * value_dim + value_dims[None, :], out,
            mask=head_mask[:, None] & value_mask[None, :],
        )  # fmt: skip
        tl.store(stats_ptr + address * 2, highest, mask=head_mask)
        tl.store(stats_ptr + address * 2 + 1, total, mask=head_mask)


@triton.jit
def _store(target_ptr, scales_ptr, row, x, mask, FLOAT8: tl.constexpr):
    """Store an entry of a pool, in FP8 with the scale of its row."""
    if FLOAT8:
        x = x.to(tl.float32)
        scale, inverse = scale_of(tl.max(tl.abs(x), 0))
        tl.store(scales_ptr + row, scale)
        x *= inverse
    tl.store(target_ptr, x.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _capped(scores, softcap):
    x = scores / softcap
    # tanh(x) = 1 - 2 / (e^2x + 1)
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def _merge_kernel(
    parts_ptr, stats_ptr, sinks_ptr, out_ptr, num_heads, value_dim,
    SPLITS: tl.constexpr, VALUE_DIM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, VALUE_DIM)
    address = head * SPLITS + splits
    highest = tl.load(stats_ptr + address * 2)
    weights = tl.exp(highest - tl.max(highest, 0))
    total = tl.sum(weights * tl.load(stats_ptr + address * 2 + 1), 0)
    if SINKS:
        total += tl.exp(tl.load(sinks_ptr + head % num_heads).to(tl.float32) - tl.max(highest, 0))
    dim_mask = dims < value_dim
    outputs = tl.load(parts_ptr + address[:, None] * value_dim + dims[None, :], mask=dim_mask[None, :], other=0.0)
    out = tl.sum(outputs * weights[:, None], 0) / total
    tl.store(out_ptr + head * value_dim + dims, out.to(out_ptr.dtype.element_ty), mask=dim_mask)


def supports_paged_decode(q_NQD: Tensor, keys_PKbD: Tensor) -> bool:
    """Return whether the kernel takes the tensors: fp32, fp16 or bf16 on CUDA, or keys in FP8; blocks of whole tiles.

    Heads of more than 256 in fp32 do not fit into shared memory.
    """
    fits = q_NQD.shape[-1] <= 256 or q_NQD.dtype.itemsize == 2
    return use_triton(q_NQD) and keys_PKbD.dtype in (q_NQD.dtype, FLOAT8) and keys_PKbD.shape[2] % _TILE == 0 and fits


@on_its_device
def paged_decode(
    q_NQD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    keys_PKbD: Tensor,
    values_PKbD: Tensor,
    table_NB: Tensor,
    lengths_N: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Write the new keys and values to the pool, and attend to all keys of each sequence: `[N, Q, D']`.

    The host reads no number of the GPU, so a CUDA graph can capture the call.

    Args:
        q_NQD, k_NKD, v_NKD: The new tokens, after rotation; all in the dtype of a pool without scales.
        keys_PKbD: `[P, K, b, D]`.
        values_PKbD: `[P, K, b, D']`; for values that are the first D' dims of the keys, such a view of the keys.
        table_NB: `[N, B]` int32, the blocks of each sequence, with the block of the new token.
        lengths_N: `[N]` int32, the tokens before the new token.
        scale, softcap, window, sinks: See `packed_attention`.
        scales: The scales of keys and of values, `[P, K, b]` fp32 each, of a pool in FP8 (`kernels.float8`). Values
            that are parts of keys have the keys' scales.
    """
    num, heads, head_dim = q_NQD.shape
    kv_heads, page, value_dim = keys_PKbD.shape[1], keys_PKbD.shape[2], values_PKbD.shape[-1]
    q_NQD, k_NKD, v_NKD = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q_NQD, k_NKD, v_NKD))
    group = heads // kv_heads
    group_tile = min(64, max(16, next_power_of_2(group)))
    programs = num * kv_heads * cdiv(group, group_tile)
    target_splits = cdiv(_PROGRAMS_PER_SM * num_multiprocessors(q_NQD.device), programs)
    splits = min(
        _MOST_SPLITS, next_power_of_2(target_splits), next_power_of_2(cdiv(table_NB.shape[1] * page, 4 * _TILE))
    )
    out = q_NQD.new_empty(num, heads, value_dim)
    partials = stats = out
    if splits > 1:
        partials = out.new_empty(num, heads, splits, value_dim, dtype=torch.float32)
        stats = partials.new_empty(num, heads, splits, 2)
    own_values = values_PKbD.data_ptr() != keys_PKbD.data_ptr()
    # A value that lies in its key has the key's rows.
    value_row = value_dim if own_values else head_dim
    dim, width = next_power_of_2(max(head_dim, 16)), next_power_of_2(max(value_dim, 16))
    _decode_kernel[(num, kv_heads * cdiv(group, group_tile), splits)](
        q_NQD, k_NKD, v_NKD if own_values else k_NKD, keys_PKbD, values_PKbD, *(scales or (None, None)),
        table_NB, lengths_N, sinks, out, partials, stats, kv_heads, group,
        q_NQD.stride(0), k_NKD.stride(0), (v_NKD if own_values else k_NKD).stride(0), table_NB.stride(0),
        head_dim, value_dim, value_row, scale, softcap or 0.0, window or 0,
        PAGE=page, TILE=_TILE if dim <= 256 else 16, GROUP=group_tile, DIM=dim, VALUE_DIM=width, SPLITS=splits,
        SOFTCAP=softcap is not None, WINDOW=window is not None, SINKS=sinks is not None, OWN_VALUES=own_values,
        FLOAT8=scales is not None, num_warps=4, num_stages=3 if dim <= 256 else 1,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(num * heads,)](
            partials, stats, sinks, out, heads, value_dim,
            SPLITS=splits, VALUE_DIM=width, SINKS=sinks is not None, num_warps=4 if splits * width > 1024 else 1,
        )  # fmt: skip
    return out
