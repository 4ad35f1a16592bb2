"""Ulysses: exchange tokens for heads, attend to whole sequences, exchange back. https://arxiv.org/abs/2309.14509

Shape legend: T tokens of the whole pack, n ranks, Q query heads, K key-value heads, D head size.
"""

import math
from typing import Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.attention.packed import AttentionOptions, packed_attention
from parallel_layers.collectives import all_to_all


def ulysses_attention(
    q_TQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    group: ProcessGroup | None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """`packed_attention` over tokens that are sharded in the contiguous layout of `split_sequence`.

    Each rank attends with Q/n of the heads to the whole pack, on any backend and with any option. Any number of heads:
    key-value heads are repeated until n divides them; when that is not possible under the query heads' grouping, each
    query head gets its own copy and both are padded with zero heads to a multiple of n.

    Forward: two all-to-alls, of the projections and of the outputs. Backward: the same two in reverse.

    Args:
        q_TQD: `[T/n, Q, D]`, after rotation by the tokens' own positions.
        k_TKD: `[T/n, K, D]`.
        v_TKD: `[T/n, K, D']`.
        cu_seqlens: `[S+1]` int32 boundaries in the whole pack.
        max_seqlen: At least the longest segment.
        group: The context-parallel group; None or one rank: plain `packed_attention`.
        **options: Those of `packed_attention`; `sinks [Q]` are whole on every rank, and their gradient is this rank's
            share (0 for the other ranks' heads).

    Returns:
        `[T/n, Q, D']`.
    """
    if group is None or group.size() == 1:
        return packed_attention(q_TQD, k_TKD, v_TKD, cu_seqlens, max_seqlen, **options)
    size, rank, heads = group.size(), group.rank(), q_TQD.shape[1]
    kv_heads, head_dim, value_dim = k_TKD.shape[1], k_TKD.shape[2], v_TKD.shape[2]
    repeated = math.lcm(kv_heads, size)
    copies = (repeated if heads % repeated == 0 else heads) // kv_heads
    if copies > 1:
        k_TKD, v_TKD = k_TKD.repeat_interleave(copies, dim=1), v_TKD.repeat_interleave(copies, dim=1)
    padding = -heads % size
    if padding:  # then every query head has its own key-value head
        q_TQD, k_TKD, v_TKD = (F.pad(x, (0, 0, 0, padding)) for x in (q_TQD, k_TKD, v_TKD))
    local_heads, local_kv_heads = q_TQD.shape[1] // size, k_TKD.shape[1] // size

    # One exchange for all three: what goes to one rank lies together.
    to_ranks = [x.unflatten(1, (size, -1)).flatten(2) for x in (q_TQD, k_TKD, v_TKD)]
    sizes = [local_heads * head_dim, local_kv_heads * head_dim, local_kv_heads * value_dim]
    mixed = all_to_all(torch.cat(to_ranks, dim=-1), group, split_dim=1, concat_dim=0).squeeze(1)
    q, k, v = mixed.split(sizes, dim=-1)
    q, k, v = q.unflatten(-1, (-1, head_dim)), k.unflatten(-1, (-1, head_dim)), v.unflatten(-1, (-1, value_dim))
    sinks = options.get("sinks")
    if sinks is not None:
        mine = slice(rank * local_heads, (rank + 1) * local_heads)
        options = {**options, "sinks": F.pad(sinks, (0, padding))[mine]}
    out = packed_attention(q, k, v, cu_seqlens, max_seqlen, **options)
    out = all_to_all(out, group, split_dim=0, concat_dim=1)
    return out[:, :heads] if padding else out
