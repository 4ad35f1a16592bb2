"""Repetition and padding of heads, so that Ulysses can divide any number of heads evenly over the ranks.

Shape legend: T tokens, Q query heads, K key-value heads, G = Q / K, D head size, n ranks.
"""

from dataclasses import dataclass
from math import gcd

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class HeadPlan:
    """The repetition and padding of Q query and K key-value heads for n ranks.

    Each key-value head is repeated `repeats` times, the query heads of each resulting group are padded to `group_size`,
    and `extra` groups of zeros are appended. The plan is (1, G, 0) if n divides Q and K.
    """

    num_query_heads: int
    num_kv_heads: int
    repeats: int
    group_size: int
    extra: int

    @property
    def kv_heads_sent(self) -> int:
        """Key-value heads over all ranks, including repetitions and padding."""
        return self.num_kv_heads * self.repeats + self.extra

    @property
    def query_heads_sent(self) -> int:
        """Query heads over all ranks, including padding."""
        return self.kv_heads_sent * self.group_size

    @property
    def heads_sent(self) -> tuple[int, int]:
        """The cost of the plan: query heads, then key-value heads."""
        return self.query_heads_sent, self.kv_heads_sent

    def spread_keys(self, x_TKD: Tensor) -> Tensor:
        """Repeat and pad keys or values to `[T, kv_heads_sent, D]`."""
        if self.repeats > 1:
            x_TKD = x_TKD.repeat_interleave(self.repeats, dim=1)
        return F.pad(x_TKD, (0, 0, 0, self.extra)) if self.extra else x_TKD

    def spread_queries(self, x_TQD: Tensor) -> Tensor:
        """Pad queries to `[T, query_heads_sent, D]`."""
        if self.query_heads_sent == self.num_query_heads:
            return x_TQD
        groups = x_TQD.unflatten(1, (self.num_kv_heads, -1))
        groups = F.pad(groups, (0, 0, 0, self.repeats * self.group_size - groups.shape[2]))
        return F.pad(groups.flatten(1, 2), (0, 0, 0, self.extra * self.group_size))

    def gather_queries(self, x_TQD: Tensor) -> Tensor:
        """Drop the padding: the inverse of `spread_queries`."""
        if self.query_heads_sent == self.num_query_heads:
            return x_TQD
        groups = x_TQD[:, : self.num_kv_heads * self.repeats * self.group_size].unflatten(1, (self.num_kv_heads, -1))
        return groups[:, :, : self.num_query_heads // self.num_kv_heads].flatten(1, 2)


def plan_heads(num_query_heads: int, num_kv_heads: int, size: int) -> HeadPlan:
    """Return the plan with the fewest query heads over `size` ranks; among equal plans, the fewest key-value heads.

    Plans of the first kind keep the groups: they repeat key-value heads until `size` divides their number, and pad each
    group of query heads to a common size. The second kind gives each query head its own key-value head and appends
    zeros until `size` divides the number of pairs.
    """
    group = num_query_heads // num_kv_heads
    repeats = size // gcd(num_kv_heads, size)
    kept = HeadPlan(num_query_heads, num_kv_heads, repeats, -(-group // repeats), 0)
    dissolved = HeadPlan(num_query_heads, num_kv_heads, group, 1, -num_query_heads % size)
    return kept if kept.heads_sent <= dissolved.heads_sent else dissolved
