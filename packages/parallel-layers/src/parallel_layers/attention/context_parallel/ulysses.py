"""Ulysses: exchange tokens for heads, attend to whole sequences, exchange back. https://arxiv.org/abs/2309.14509

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
    """`packed_attention` over tokens that are sharded in the contiguous layout of `split_sequence`.

    Each rank attends with a share of the heads to the whole pack, on any backend and with any option.

    Communication: that of `exchange_heads`.

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

    Raises:
        ValueError: What `packed_attention` and `exchange_heads` raise; before anything is sent.
    """
    # Before the exchange, in which other ranks would wait.
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
    """Run `attend` on all tokens and a share of the heads, for tensors with a share of the tokens and all heads.

    Any number of heads: key-value heads are repeated and query heads padded as `plan_heads` says. A padded head's
    output is dropped, and its gradient is zero.

    Forward: two all-to-alls, of the projections together and of the output. Backward: the same two in reverse.

    Args:
        attend: (q, k, v, sinks) of this rank's heads `[T, Q', D]`, `[T, K', D]`, `[T, K', D']`, `[Q']` or None -> its
            output `[T, Q', D']`.
        q_TQD: `[T/n, Q, D]`, tokens in the contiguous layout of `split_sequence`.
        k_TKD: `[T/n, K, D]`.
        v_TKD: `[T/n, K, D']`.
        group: The ranks that share the tokens; None or one rank: `attend` itself.
        sinks: `[Q]`, whole on every rank; their gradient is this rank's share.

    Returns:
        `[T/n, Q, D']`.

    Raises:
        ValueError: Heads that do not fit together, or other numbers of keys than of queries; before anything is sent.
    """
    check_heads(q_TQD, k_TKD, v_TKD, sinks)
    if group is None or group.size() == 1:
        return attend(q_TQD, k_TKD, v_TKD, sinks)
    if len(q_TQD) != len(k_TKD):
        raise ValueError(
            f"{len(q_TQD)} queries but {len(k_TKD)} keys on a rank; pad one to as many tokens as the other"
        )
    size = group.size()
    plan = plan_heads(q_TQD.shape[1], k_TKD.shape[1], size)
    parts = (plan.spread_queries(q_TQD), plan.spread_keys(k_TKD), plan.spread_keys(v_TKD))
    # One exchange for all three: what goes to one rank lies together, values of another size than keys, too.
    to_ranks = [x.unflatten(1, (size, -1)).flatten(2) for x in parts]
    mixed = all_to_all(torch.cat(to_ranks, dim=-1), group, split_dim=1, concat_dim=0).squeeze(1)
    local = mixed.split([x.shape[-1] for x in to_ranks], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, part.shape[-1])) for x, part in zip(local, parts, strict=True))
    if sinks is not None:  # they follow their heads
        sinks = plan.spread_queries(sinks.view(1, -1, 1)).flatten().chunk(size)[group.rank()]
    out = all_to_all(attend(q, k, v, sinks), group, split_dim=0, concat_dim=1)
    return plan.gather_queries(out)
