"""Ulysses attention: exchange tokens for heads, attend, exchange back. https://arxiv.org/abs/2309.14509

Shape legend: T tokens of the whole pack, n ranks, Q query heads, K key-value heads, D head size, D' size of a value
head.
"""

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention.context_parallel.head_exchange import plan_heads
from parallel_layers.attention.packed import AttentionOptions, check_heads, check_segments, packed_attention
from parallel_layers.distributed.collectives import all_to_all

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


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
    """`packed_attention` over tokens sharded in the contiguous layout of `split_sequence`.

    Each rank attends with a share of the heads to the whole pack, on any backend and with any option.

    Communication: see `exchange_heads`.

    Args:
        q_TQD: `[T/n, Q, D]`, rotated by the tokens' positions.
        k_TKD: `[T/n, K, D]`, rotated.
        v_TKD: `[T/n, K, D']`.
        cu_seqlens: `[S+1]` int32 boundaries in the whole pack.
        max_seqlen: Upper bound of a segment's length.
        group: The context-parallel group; None or one rank: plain `packed_attention`.
        **options: Options of `packed_attention`. `sinks [Q]` are replicated; their gradient is this rank's share (0 for
            the other ranks' heads).

    Returns:
        `[T/n, Q, D']`.

    Raises:
        ValueError: `packed_attention` or `exchange_heads` raises. All checks precede the first exchange.
    """
    # Check before the exchange: if one rank raised later, the others would wait.
    bounds = options.get("cu_seqlens_k"), options.get("used_k")
    check_segments(q_TQD, k_TKD, v_TKD, cu_seqlens, options.get("window"), *bounds)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        mine: AttentionOptions = {**options, "sinks": sinks}
        return packed_attention(q, k, v, cu_seqlens, max_seqlen, **mine)

    return exchange_heads(attend, q_TQD, k_TKD, v_TKD, group, sinks=options.get("sinks"))


def exchange_heads(
    attend: Attend,
    q_TQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    group: ProcessGroup | None,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """Exchange tokens for heads, run `attend` on all tokens with a share of the heads, and exchange back.

    Any number of heads is legal: `plan_heads` repeats key-value heads and pads query heads. The outputs of padded heads
    are dropped.

    Forward: two all-to-alls, one of q, k, v together and one of the output. Backward: the same two in reverse.

    Args:
        attend: Function of q `[T, Q', D]`, k `[T, K', D]`, v `[T, K', D']` and sinks `[Q']` or None of this rank's
            heads; returns the output `[T, Q', D']`.
        q_TQD: `[T/n, Q, D]`, tokens in the contiguous layout of `split_sequence`.
        k_TKD: `[T/n, K, D]`.
        v_TKD: `[T/n, K, D']`.
        group: The ranks that share the tokens; None or one rank: call `attend` directly.
        sinks: `[Q]`, replicated; the gradient is this rank's share.

    Returns:
        `[T/n, Q, D']`.

    Raises:
        ValueError: The heads disagree, or the numbers of keys and queries differ. All checks precede the exchange.
    """
    check_heads(q_TQD, k_TKD, v_TKD, sinks)
    if group is None or group.size() == 1:
        return attend(q_TQD, k_TKD, v_TKD, sinks)
    if len(q_TQD) != len(k_TKD):
        raise ValueError(f"{len(q_TQD)} queries but {len(k_TKD)} keys on a rank; pad both to the same number of tokens")
    size = group.size()
    plan = plan_heads(q_TQD.shape[1], k_TKD.shape[1], size)
    parts = (plan.spread_queries(q_TQD), plan.spread_keys(k_TKD), plan.spread_keys(v_TKD))
    # One exchange for q, k and v: the parts for one rank are contiguous.
    to_ranks = [x.unflatten(1, (size, -1)).flatten(2) for x in parts]
    mixed = all_to_all(torch.cat(to_ranks, dim=-1), group, split_dim=1, concat_dim=0).squeeze(1)
    local = mixed.split([x.shape[-1] for x in to_ranks], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, part.shape[-1])) for x, part in zip(local, parts, strict=True))
    if sinks is not None:  # this rank's heads
        sinks = plan.spread_queries(sinks.view(1, -1, 1)).flatten().chunk(size)[group.rank()]
    out = all_to_all(attend(q, k, v, sinks), group, split_dim=0, concat_dim=1)
    return plan.gather_queries(out)
