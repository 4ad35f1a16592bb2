"""How many heads of each kind are exchanged for tokens: any numbers made such that the ranks can share them evenly.

Shape legend: T tokens, Q query heads, K key-value heads, G = Q / K query heads a key-value head, D head size, n ranks.
"""

from dataclasses import dataclass
from math import gcd

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class HeadPlan:
    """What is done to Q query and K key-value heads before n ranks share them.

    Each key-value head is repeated `repeats` times; the query heads of each of the resulting groups are padded to
    `group_size`; then `extra` whole groups of zeros are appended. (1, G, 0) where n divides both numbers.
    """

    num_query_heads: int
    num_kv_heads: int
    repeats: int
    group_size: int
    extra: int

    @property
    def kv_heads_sent(self) -> int:
        """Key-value heads over all ranks, with what is repeated and padded."""
        return self.num_kv_heads * self.repeats + self.extra

    @property
    def query_heads_sent(self) -> int:
        """Query heads over all ranks, with what is padded."""
        return self.kv_heads_sent * self.group_size

    @property
    def heads_sent(self) -> tuple[int, int]:
        """What a plan costs: query heads, then key-value heads."""
        return self.query_heads_sent, self.kv_heads_sent

    def spread_keys(self, x_TKD: Tensor) -> Tensor:
        """Keys or values as they are sent: `[T, kv_heads_sent, D]`."""
        if self.repeats > 1:
            x_TKD = x_TKD.repeat_interleave(self.repeats, dim=1)
        return F.pad(x_TKD, (0, 0, 0, self.extra)) if self.extra else x_TKD

    def spread_queries(self, x_TQD: Tensor) -> Tensor:
        """Queries as they are sent: `[T, query_heads_sent, D]`."""
        if self.query_heads_sent == self.num_query_heads:
            return x_TQD
        groups = x_TQD.unflatten(1, (self.num_kv_heads, -1))
        groups = F.pad(groups, (0, 0, 0, self.repeats * self.group_size - groups.shape[2]))
        return F.pad(groups.flatten(1, 2), (0, 0, 0, self.extra * self.group_size))

    def gather_queries(self, x_TQD: Tensor) -> Tensor:
        """The inverse of `spread_queries`: drops the padding."""
        if self.query_heads_sent == self.num_query_heads:
            return x_TQD
        groups = x_TQD[:, : self.num_kv_heads * self.repeats * self.group_size].unflatten(1, (self.num_kv_heads, -1))
        return groups[:, :, : self.num_query_heads // self.num_kv_heads].flatten(1, 2)


def plan_heads(num_query_heads: int, num_kv_heads: int, size: int) -> HeadPlan:
    """The plan that sends the fewest query heads over `size` ranks, and of those the fewest key-value heads.

    Either the groups stay: each key-value head is repeated until the ranks can share them, and each group of query
    heads is padded to a common size. Or they are dissolved: every query head gets a key-value head of its own, and
    zeros are appended until the ranks can share the pairs.
    """
    group = num_query_heads // num_kv_heads
    repeats = size // gcd(num_kv_heads, size)
    kept = HeadPlan(num_query_heads, num_kv_heads, repeats, -(-group // repeats), 0)
    dissolved = HeadPlan(num_query_heads, num_kv_heads, group, 1, -num_query_heads % size)
    return kept if kept.heads_sent <= dissolved.heads_sent else dissolved
