"""Ulysses attention: exchange tokens for heads, attend, exchange back. https://arxiv.org/abs/2309.14509

Shape legend: T tokens of the whole pack, n ranks, Q query heads, K key-value heads, D head size, D' size of a value
head.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple, Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.attention.kernel_interface import Segments
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

    Each rank attends with a share of the heads to the whole pack, on any backend and with any option. The gradient of
    `sinks` is 0 for the other ranks' heads. Communication: see `exchange_heads`. Arguments and result: as of
    `ring_attention`.

    Raises:
        ValueError: `packed_attention` or `exchange_heads` raises. Shapes are checked before the exchange.
    """
    # Check before the exchange: if one rank raised later, the others would wait.
    keys = options.get("cu_seqlens_k"), options.get("max_seqlen_k"), options.get("used_k")
    ranks = 1 if group is None else group.size()
    check_segments(q_TQD, k_TKD, v_TKD, Segments.of(cu_seqlens, max_seqlen, *keys), ranks)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        local_options: AttentionOptions = {**options, "sinks": sinks}
        return packed_attention(q, k, v, cu_seqlens, max_seqlen, **local_options)

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

    Any number of heads is legal: `plan_heads` repeats key-value heads and pads query heads.

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
    exchange = HeadExchange(q_TQD.shape[1], k_TKD.shape[1], group)
    (q,), (k, v) = exchange.to_heads([q_TQD], [k_TKD, v_TKD])
    return exchange.to_tokens(attend(q, k, v, None if sinks is None else exchange.heads_of_rank(sinks)))


class HeadExchange:
    """Exchange the tokens of a rank for a share of the heads of all tokens, and back.

    The shares are those of `plan_heads`: query head h goes to the same rank as key-value head h // (Q / K).

    Args:
        num_query_heads: Q.
        num_kv_heads: K, which divides Q.
        group: The ranks that share the tokens, at least two.
    """

    def __init__(self, num_query_heads: int, num_kv_heads: int, group: ProcessGroup) -> None:
        self.group, self.plan = group, plan_heads(num_query_heads, num_kv_heads, group.size())

    def to_heads(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Send `[T/n, Q, ...]` and `[T/n, K, ...]` of one dtype in one all-to-all: `[T, Q', ...]` and `[T, K', ...]`.

        Backward: the same all-to-all in reverse.
        """
        size = self.group.size()
        spread = [*map(self.plan.spread_queries, queries), *map(self.plan.spread_keys, keys)]
        # The parts for one rank are contiguous.
        to_ranks = [x.unflatten(1, (size, -1)).flatten(2) for x in spread]
        mixed = all_to_all(torch.cat(to_ranks, dim=-1), self.group, split_dim=1, concat_dim=0).squeeze(1)
        local = mixed.split([x.shape[-1] for x in to_ranks], dim=-1)
        heads = [part.unflatten(-1, (-1, *x.shape[2:])) for part, x in zip(local, spread, strict=True)]
        return heads[: len(queries)], heads[len(queries) :]

    def to_tokens(self, x_TQD: Tensor) -> Tensor:
        """Send the heads back, `[T, Q', D]` -> `[T/n, Q, D]`, in one all-to-all."""
        return self.plan.gather_queries(all_to_all(x_TQD, self.group, split_dim=0, concat_dim=1))

    def heads_of_rank(self, per_head: Tensor) -> Tensor:
        """Return the numbers of this rank's query heads, `[Q]` -> `[Q']`; no communication."""
        return self.plan.spread_queries(per_head[None]).flatten().chunk(self.group.size())[self.group.rank()]


class _HeadPlan(NamedTuple):
    """Repeat each key-value head `repeats` times, pad the query heads of each group to `group_size`, and append `extra`
    groups of zeros, so that n ranks divide the heads evenly.
    """

    num_query_heads: int
    num_kv_heads: int
    repeats: int
    group_size: int
    extra: int

    @property
    def heads_sent(self) -> tuple[int, int]:
        """Query heads and key-value heads over all ranks."""
        groups = self.num_kv_heads * self.repeats + self.extra
        return groups * self.group_size, groups

    def spread_keys(self, x: Tensor) -> Tensor:
        """Repeat and pad keys or values, `[T, K, ...]`."""
        if self.repeats > 1:
            x = x.repeat_interleave(self.repeats, dim=1)
        return _pad_heads(x, self.extra)

    def spread_queries(self, x: Tensor) -> Tensor:
        """Pad queries, `[T, Q, ...]`."""
        if self.heads_sent[0] == self.num_query_heads:
            return x
        groups = x.unflatten(1, (self.num_kv_heads, -1)).transpose(1, 2)
        groups = _pad_heads(groups, self.repeats * self.group_size - groups.shape[1])
        return _pad_heads(groups.transpose(1, 2).flatten(1, 2), self.extra * self.group_size)

    def gather_queries(self, x_TQD: Tensor) -> Tensor:
        """Drop the padding: the inverse of `spread_queries`."""
        if self.heads_sent[0] == self.num_query_heads:
            return x_TQD
        groups = x_TQD[:, : self.num_kv_heads * self.repeats * self.group_size].unflatten(1, (self.num_kv_heads, -1))
        return groups[:, :, : self.num_query_heads // self.num_kv_heads].flatten(1, 2)


def _pad_heads(x: Tensor, heads: int) -> Tensor:
    """Append zeros to dim 1."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, heads)) if heads else x


def plan_heads(num_query_heads: int, num_kv_heads: int, size: int) -> _HeadPlan:
    """Return the plan with the fewest query heads over `size` ranks; among equal plans, the fewest key-value heads."""
    group = num_query_heads // num_kv_heads
    repeats = size // gcd(num_kv_heads, size)
    # Keep the groups: repeat key-value heads and pad the query heads of each. Or dissolve the groups: each query head
    # has its own key-value head, and zeros are appended.
    grouped = _HeadPlan(num_query_heads, num_kv_heads, repeats, -(-group // repeats), 0)
    dissolved = _HeadPlan(num_query_heads, num_kv_heads, group, 1, -num_query_heads % size)
    return min(grouped, dissolved, key=lambda plan: plan.heads_sent)
