"""Attention with one order of sums for training and decoding: packed keys, or keys in the blocks of a pool.

Each query walks the keys of its sequence in tiles that begin at multiples of `_TILE`, with an online softmax
(https://arxiv.org/abs/1805.02867). A tile without visible keys changes no bit of a query, so its result depends neither
on the other queries of a call nor on the place of the keys. A program takes the query heads of one key-value head.

Shape legend: T queries, Q query heads, K key-value heads, D head size, D' size of a value head, S segments, P blocks of
a pool, b tokens of a block, B blocks of a segment.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import math

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton, use_triton

_TILE = 64
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, begins_ptr, used_ptr, table_ptr, kv_heads, group, tokens,
    q_stride, k_stride, v_stride, table_stride, head_dim, value_dim, scale, softcap, window,
    PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Rows of a tile are the heads of a key-value head's group, token by token. PAGE=0: the keys are packed."""
    segment, kv_head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin_q = tl.load(cu_q_ptr + segment).to(tl.int64)
    num_q = (tl.load(cu_q_ptr + segment + 1) - begin_q).to(tl.int32)
    first_row = tl.program_id(0) * ROWS
    if first_row >= num_q * group:
        return
    num_k = tl.load(used_ptr + segment)
    row = first_row + tl.arange(0, ROWS)
    token, head = row // group, kv_head * group + row % group
    inside = token < num_q
    place = token + num_k - num_q
    dims, value_dims = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    dim_mask, value_mask = dims < head_dim, value_dims < value_dim
    q = tl.load(
        q_ptr + (begin_q + token)[:, None] * q_stride + head[:, None] * head_dim + dims[None, :],
        mask=inside[:, None] & dim_mask[None, :], other=0.0,
    )  # fmt: skip
    begin_k = tl.load(begins_ptr + segment).to(tl.int64) if PAGE == 0 else 0

    begin, end = 0, num_k
    if CAUSAL:
        end = tl.minimum(num_k, (first_row + ROWS - 1) // group + num_k - num_q + 1)
    if WINDOW:
        begin = tl.maximum(first_row // group + num_k - num_q + 1 - window, 0) // TILE * TILE
    highest = tl.full((ROWS,), -1e38, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, VALUE_DIM), tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        valid = position < num_k
        if PAGE == 0:
            k_row = (begin_k + position) * k_stride + kv_head * head_dim
            v_row = (begin_k + position) * v_stride + kv_head * value_dim
        else:
            page = tl.load(table_ptr + segment * table_stride + start // PAGE).to(tl.int64)
            pool_row = (page * kv_heads + kv_head) * PAGE + position % PAGE
            k_row, v_row = pool_row * head_dim, pool_row * value_dim
        k = tl.load(k_ptr + k_row[:, None] + dims[None, :], mask=valid[:, None] & dim_mask[None, :], other=0.0)
        v = tl.load(v_ptr + v_row[:, None] + value_dims[None, :], mask=valid[:, None] & value_mask[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1)
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (scores / softcap)) + 1.0))
        scores *= _LOG2_E
        distance = place[:, None] - position[None, :]
        visible = valid[None, :]
        if CAUSAL:
            visible = visible & (distance >= 0)
        if WINDOW:
            visible = visible & (tl.abs(distance) < window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None])
        highest = higher

    out = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out_ptr + ((begin_q + token) * kv_heads * group + head)[:, None] * value_dim + value_dims[None, :],
        out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & value_mask[None, :],
    )  # fmt: skip
    lse = (highest + tl.log2(total)) * _LN_2
    tl.store(lse_ptr + head * tokens + begin_q + token, tl.where(total > 0, lse, float("-inf")), mask=inside)


def supports_block_attention(q: Tensor, keys: Tensor, page: int = _TILE) -> bool:
    """Return whether the kernel takes the tensors: fp16 or bf16 on CUDA, blocks of whole tiles.

    Heads are multiples of 8, up to 256, as in the backward of `attention.blocks`.
    """
    is_half = q.dtype in (torch.float16, torch.bfloat16) and q.dtype == keys.dtype
    return is_half and use_triton(q, keys) and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and page % _TILE == 0


@on_its_device
def block_attention(
    q_TQD: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_q: Tensor,
    used_S: Tensor,
    max_q: int,
    *,
    begins_S: Tensor | None = None,
    table_SB: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output `[T, Q, D']` and the log-sum-exp `[Q, T]` fp32; zero and -inf for a query without keys.

    The host reads no number of the GPU, so a CUDA graph can capture the call.

    Args:
        q_TQD: `[T, Q, D]`, after rotation.
        keys, values: `[T', K, D]` and `[T', K, D']`, or with a table `[P, K, b, D]` and `[P, K, b, D']`.
        cu_q: `[S+1]` int32, the boundaries of the segments among the queries. The queries are the last keys. With a
            table the segments hold all queries.
        used_S: `[S]` int32, the keys of each segment.
        max_q: Upper bound of a segment's queries.
        begins_S: `[S]` int32, the first key of each segment, without a table.
        table_SB: `[S, B]` int32, the blocks of each segment.
        causal, window, scale, softcap: See `packed_attention`.
    """
    num_tokens, heads, head_dim = q_TQD.shape
    kv_heads, value_dim = keys.shape[1], values.shape[-1]
    q_TQD, keys, values = (x if _is_dense(x) else x.contiguous() for x in (q_TQD, keys, values))
    group = heads // kv_heads
    out = q_TQD.new_empty(num_tokens, heads, value_dim)
    lse = q_TQD.new_empty(heads, num_tokens, dtype=torch.float32)
    if table_SB is None:  # tokens may lie outside of the segments
        out.zero_(), lse.fill_(-math.inf)
    rows = 128 if max_q * group > 64 else 64
    dim, width = next_power_of_2(max(head_dim, 16)), next_power_of_2(max(value_dim, 16))
    _attention_kernel[(cdiv(max_q * group, rows), len(used_S), kv_heads)](
        q_TQD, keys, values, out, lse, cu_q, begins_S, used_S, table_SB, kv_heads, group, num_tokens,
        q_TQD.stride(0), keys.stride(0), values.stride(0), 0 if table_SB is None else table_SB.stride(0),
        head_dim, value_dim, scale, softcap or 0.0, window or 0,
        PAGE=0 if table_SB is None else keys.shape[2], ROWS=rows, TILE=_TILE if dim <= 128 else _TILE // 2,
        DIM=dim, VALUE_DIM=width, CAUSAL=causal, WINDOW=window is not None, SOFTCAP=softcap is not None,
        num_warps=rows // 16, num_stages=2,
    )  # fmt: skip
    return out, lse


def _is_dense(x: Tensor) -> bool:
    """Return whether all dims behind the first are dense."""
    return x[:1].is_contiguous() or x.shape[0] == 0
