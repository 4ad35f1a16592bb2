"""The interface of attention kernels: segments, scoring rule, and the raw forward and backward.

Shape legend: T tokens, Q query heads, K key-value heads, D head size, S segments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Segments(NamedTuple):
    """The places of each segment's queries and keys in the packed tensors.

    Attributes:
        cu_q, cu_k: Boundaries of the segments among the queries and among the keys, `[S+1]` int32 each.
        used_k: The number of valid keys at the start of each segment, `[S]` int32; None: all keys are valid.
        max_q, max_k: Upper bounds of a segment's queries and keys.
    """

    cu_q: Tensor
    cu_k: Tensor
    used_k: Tensor | None
    max_q: int
    max_k: int

    @classmethod
    def of(
        cls,
        cu_q: Tensor,
        max_q: int,
        cu_k: Tensor | None = None,
        max_k: int | None = None,
        used_k: Tensor | None = None,
    ) -> Self:
        """Return the segments of a call of `packed_attention`, with its defaults."""
        if cu_k is None:
            cu_k, max_k = cu_q, max_q
        return cls(cu_q, cu_k, used_k, max_q, max_q if max_k is None else max_k)

    @property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """`(cu_q, cu_k, max_q, max_k)`, the order of the flash kernels' arguments."""
        return self.cu_q, self.cu_k, self.max_q, self.max_k

    @property
    def lengths_k(self) -> Tensor:
        """The number of each segment's valid keys, `[S]`."""
        return self.cu_k.diff() if self.used_k is None else self.used_k

    def on_host(self) -> list[tuple[int, int, int, int]]:
        """Read (first query, number of queries, first key, number of valid keys) of each segment on the host."""
        starts_k, lengths_k = self.cu_k.tolist()[:-1], self.lengths_k.tolist()
        queries = pairwise(self.cu_q.tolist())
        return [(a, b - a, k, n) for (a, b), k, n in zip(queries, starts_k, lengths_k, strict=True)]


@dataclass(frozen=True)
class Scoring:
    """The scale, cap and mask of scores, as in `packed_attention`."""

    causal: bool
    window: int | None
    scale: float
    softcap: float | None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} tokens; use None for no window, or at least 1 (the token itself)")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap} must be positive; use None for no soft-cap")

    @property
    def flash_window(self) -> dict[str, int]:
        """The flash kernels' names of the numbers of keys visible on each side of the query; -1: unlimited."""
        reach = -1 if self.window is None else self.window - 1
        return {"window_size_left": reach, "window_size_right": 0 if self.causal else reach}

    def sees(self, distance: Tensor) -> Tensor:
        """Return whether a query sees a key that is `distance` places before it."""
        visible = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return visible if self.window is None else visible & (distance.abs() < self.window)


class Kernel(NamedTuple):
    """A raw forward and backward without autograd.

    The backward computes p = exp(score - lse) and delta = sum(out · d_out) from the given output and log-sum-exp. If
    the caller has merged further keys into both (sinks, ring attention), the result is the share of this call's keys.

    Attributes:
        forward: Function of q `[T, Q, D]`, k and v `[T, K, D]`. Returns the output `[T, Q, D]` and the log-sum-exp
            `[Q, T]` fp32 (fp64 for fp64 input). A query without keys has zero and -inf.
        backward: Function of d_out, q, k, v, the output and the log-sum-exp. Returns d_q, d_k and d_v.
        workspace: Function of q, k and v. Returns new tensors of the sizes that the backward needs beside its results;
            a plan of memory counts them (`kernels.runtime.planned_for`).
    """

    forward: Callable[[Tensor, Tensor, Tensor, Segments, Scoring], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Segments, Scoring], tuple[Tensor, Tensor, Tensor]
    ]
    workspace: Callable[[Tensor, Tensor, Tensor], list[Tensor]] = lambda q, k, v: []
