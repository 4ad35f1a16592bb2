"""What an attention call is asked for, apart from its tensors: the segments, and the rule of the scores.

Shape legend: T tokens, Q query heads, K key-value heads, D head size, S segments.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class Segments(NamedTuple):
    """Where each segment's queries and keys lie in the packed tensors.

    Attributes:
        cu_q: `[S+1]` int32, boundaries of the segments among the queries.
        cu_k: `[S+1]` int32, boundaries among the keys.
        used_k: `[S]` int32: only the first `used_k[s]` keys of segment s exist; None: all of them.
        max_q: At least the longest segment's queries.
        max_k: At least the longest segment's keys.
    """

    cu_q: Tensor
    cu_k: Tensor
    used_k: Tensor | None
    max_q: int
    max_k: int

    @property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """cu_q, cu_k, max_q, max_k: the order in which the flash kernels take them."""
        return self.cu_q, self.cu_k, self.max_q, self.max_k


@dataclass(frozen=True)
class Scoring:
    """How scores are made from products. With n_q queries and n_k keys in a segment, query i stands at i + n_k - n_q.

    Attributes:
        causal: A query sees no key after its own place.
        window: It sees only the keys less than `window` places away (its own included); None: all.
        scale: Products are multiplied by this.
        softcap: Then c becomes softcap · tanh(c / softcap); None: no cap.
    """

    causal: bool
    window: int | None
    scale: float
    softcap: float | None

    def __post_init__(self) -> None:
        """Raise ValueError for a soft-cap that bounds nothing."""
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap} must be positive; use None for no soft-cap")

    @property
    def flash_window(self) -> tuple[int, int]:
        """(left, right) as the flash kernels count: keys beside the query's own place; -1 is without limit."""
        left = -1 if self.window is None else self.window - 1
        return left, 0 if self.causal else left


class Forward(NamedTuple):
    """A finished forward: all that its backward needs.

    Attributes:
        q: `[T, Q, D]`.
        k: `[T, K, D]`.
        v: `[T, K, D]`.
        out: `[T, Q, D]`.
        lse: Log-sum-exp `[Q, T]` fp32 (fp64 for fp64 input), -inf for a query without keys, whose output is zero.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Kernel(Protocol):
    """A pair of functions that know nothing of autograd, so that every user shares one differentiable wrapper."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """(q `[T, Q, D]`, k, v `[T, K, D]`) -> the output `[T, Q, D]` and the log-sum-exp `[Q, T]`; see `Forward`."""
        ...

    def backward(
        self, d_out: Tensor, done: Forward, segments: Segments, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """d_q, d_k, d_v in their inputs' shapes and dtypes.

        It must use the output and log-sum-exp that it is given and not recompute them: p = exp(score - lse) and
        delta = sum(out · d_out). A caller that has merged further keys into both (attention sinks, a ring of ranks)
        then gets this part's share of the gradients.
        """
        ...
