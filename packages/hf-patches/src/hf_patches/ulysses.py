"""Ulysses sequence parallelism: tokens are sharded everywhere but inside attention, where heads are (arXiv:2309.14509).

One all-to-all before attention turns [T / sp, heads] into [T, heads / sp], and one after it turns the output back; the
backward runs their inverses. Which heads are sent is a matter of counts alone, settled by `plan_heads`.

`parallel_layers.context_parallel.ulysses_attention` is this exchange around `packed_attention`. Here what runs between
the two all-to-alls is the caller's: with prefix sharing the key side is made from all T tokens there, and on Ascend
another operator attends.

Shapes: T tokens, Q query heads, K key-value heads, G = Q / K query heads a key-value head, D head size, sp ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from parallel_layers.collectives import all_to_all


@dataclass(frozen=True)
class HeadPlan:
    """How Q query and K key-value heads become numbers that sp ranks can share evenly.

    Each key-value head is first repeated `repeats` times; the query heads of each of the resulting groups are padded
    to `group_size`; then `extra` whole groups of zeros are appended. (1, G, 0) where sp divides both counts.
    """

    repeats: int
    group_size: int
    extra: int

    def num_kv_heads(self, num_kv_heads: int) -> int:
        """Key-value heads sent over all ranks."""
        return num_kv_heads * self.repeats + self.extra

    def num_query_heads(self, num_kv_heads: int) -> int:
        """Query heads sent over all ranks, padding included."""
        return self.num_kv_heads(num_kv_heads) * self.group_size


@lru_cache
def plan_heads(num_query_heads: int, num_kv_heads: int, world_size: int) -> HeadPlan:
    """The plan that sends the fewest query heads, and among those the fewest key-value heads.

    Either the groups stay: each key-value head is repeated until sp divides their number, and each of the resulting
    groups of query heads padded to a common size. Or the groups are dissolved: one key-value head for every query
    head, and pairs of zeros appended until sp divides.
    """
    group = num_query_heads // num_kv_heads
    repeats = world_size // gcd(num_kv_heads, world_size)
    grouped = HeadPlan(repeats, -(-group // repeats), 0)
    dissolved = HeadPlan(group, 1, -num_query_heads % world_size)
    return min(grouped, dissolved, key=lambda p: (p.num_query_heads(num_kv_heads), p.num_kv_heads(num_kv_heads)))


def ulysses_attention(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    query_TQD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    sinks_Q: Tensor | None,
    group: ProcessGroup,
) -> Tensor:
    """Attention over the T tokens that the ranks of `group` share; takes and returns this rank's T / sp.

    `attend(query, key, value, sinks)` sees all T tokens and this rank's share of the heads. Forward: one all-to-all of
    query, key and value together, one of the output; backward: the inverse of each. The gradient of the sinks is
    complete only after it is summed over the group, like every parameter's.
    """
    world_size, (num_queries, num_keys) = group.size(), (query_TQD.shape[1], key_TKD.shape[1])
    plan = plan_heads(num_queries, num_keys, world_size)
    size, value_size = query_TQD.shape[-1], value_TKD.shape[-1]
    parts = (
        _spread_queries(query_TQD, num_keys, plan),
        _spread_keys(key_TKD, plan),
        # One message for the three: a value head of another size (DeepSeek's) is padded for the journey.
        _spread_keys(functional.pad(value_TKD, (0, size - value_size)), plan),
    )
    # [T / sp, sp, heads of one rank, D]: the ranks' parts of the three side by side, so that one split serves all.
    by_rank = [part.unflatten(1, (world_size, -1)) for part in parts]
    mixed = all_to_all(torch.cat(by_rank, dim=2).flatten(1, 2), group, split_dim=1, concat_dim=0)
    query, key, value = mixed.split([part.shape[2] for part in by_rank], dim=1)
    sinks = None if sinks_Q is None else _local_sinks(sinks_Q, num_keys, plan, group)
    output = attend(query, key, value[..., :value_size], sinks)
    output = all_to_all(output, group, split_dim=0, concat_dim=1)
    return _gather_queries(output, num_queries, num_keys, plan)


def _spread_keys(x_TKD: Tensor, plan: HeadPlan) -> Tensor:
    x_TKD = x_TKD.repeat_interleave(plan.repeats, dim=1) if plan.repeats > 1 else x_TKD
    return functional.pad(x_TKD, (0, 0, 0, plan.extra)) if plan.extra else x_TKD


def _spread_queries(x_TQD: Tensor, num_kv_heads: int, plan: HeadPlan) -> Tensor:
    """Heads as [K, G]; each G is padded to repeats * group_size, and `extra` zero groups follow."""
    groups = x_TQD.unflatten(1, (num_kv_heads, -1))
    groups = functional.pad(groups, (0, 0, 0, plan.repeats * plan.group_size - groups.shape[2]))
    return functional.pad(groups.flatten(1, 2), (0, 0, 0, plan.extra * plan.group_size))


def _gather_queries(x_TQD: Tensor, num_query_heads: int, num_kv_heads: int, plan: HeadPlan) -> Tensor:
    """The inverse of `_spread_queries`: drops the padding."""
    padded = num_kv_heads * plan.repeats * plan.group_size
    groups = x_TQD[:, :padded].unflatten(1, (num_kv_heads, -1))
    return groups[:, :, : num_query_heads // num_kv_heads].flatten(1, 2)


def _local_sinks(sinks_Q: Tensor, num_kv_heads: int, plan: HeadPlan, group: ProcessGroup) -> Tensor:
    """This rank's sinks: they follow their query heads."""
    spread = _spread_queries(sinks_Q.view(1, -1, 1), num_kv_heads, plan).flatten()
    return spread.chunk(group.size())[group.rank()]
