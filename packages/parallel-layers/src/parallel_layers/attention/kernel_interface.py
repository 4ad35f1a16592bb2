"""The interface of attention kernels: segments, scoring rule, and the raw forward and backward.

Shape legend: T tokens, Q query heads, K key-value heads, D head size, S segments.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class Segments(NamedTuple):
    """The places of each segment's queries and keys in the packed tensors.

    Attributes:
        cu_q: Boundaries of the segments among the queries, `[S+1]` int32.
        cu_k: Boundaries of the segments among the keys, `[S+1]` int32.
        used_k: The number of valid keys at the start of each segment, `[S]` int32; None: all keys are valid.
        max_q: Upper bound of a segment's queries.
        max_k: Upper bound of a segment's keys.
    """

    cu_q: Tensor
    cu_k: Tensor
    used_k: Tensor | None
    max_q: int
    max_k: int

    @property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """Return `(cu_q, cu_k, max_q, max_k)`, the order of the flash kernels' arguments."""
        return self.cu_q, self.cu_k, self.max_q, self.max_k


@dataclass(frozen=True)
class Scoring:
    """The scale, cap and mask of scores. With n_q queries and n_k keys in a segment, query i is at place i + n_k - n_q.

    Attributes:
        causal: Mask the keys after the query's place.
        window: Mask the keys at a distance of `window` places or more; None: no window.
        scale: Factor of the products of queries and keys.
        softcap: Replace each scaled score c by softcap · tanh(c / softcap); None: no cap.
    """

    causal: bool
    window: int | None
    scale: float
    softcap: float | None

    def __post_init__(self) -> None:
        """Raise ValueError for a soft-cap that is not positive."""
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap} must be positive; use None for no soft-cap")

    @property
    def flash_window(self) -> tuple[int, int]:
        """Return the flash kernels' (left, right): the keys visible on each side of the query; -1: unlimited."""
        left = -1 if self.window is None else self.window - 1
        return left, 0 if self.causal else left


class Forward(NamedTuple):
    """The inputs and outputs of a forward, as its backward needs them.

    Attributes:
        q: `[T, Q, D]`.
        k: `[T, K, D]`.
        v: `[T, K, D]`.
        out: `[T, Q, D]`.
        lse: Log-sum-exp `[Q, T]` fp32 (fp64 for fp64 input). A query without keys has -inf and an output of zero.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Kernel(Protocol):
    """A raw forward and backward without autograd; `packed_attention` wraps both."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Return the output `[T, Q, D]` and log-sum-exp `[Q, T]` for q `[T, Q, D]` and k, v `[T, K, D]`."""
        ...

    def backward(
        self, d_out: Tensor, done: Forward, segments: Segments, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return d_q, d_k, d_v in the shapes and dtypes of q, k, v.

        It uses the given output and log-sum-exp: p = exp(score - lse), delta = sum(out · d_out). If the
        caller has merged further keys into both (sinks, ring attention), the result is the share of this call's keys.
        """
        ...
