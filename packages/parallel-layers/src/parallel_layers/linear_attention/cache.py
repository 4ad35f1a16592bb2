"""`LayerStates`: the operators of linear attention over a cache; `parallel_layers.inference` has the caches.

Shape legend: as in `convolution`, `delta_rule` and `state_space`.
"""

from abc import ABC, abstractmethod

from torch import Tensor


class LayerStates(ABC):
    """The operators of one layer for new tokens of the sequences of a cache.

    A method has the arguments of the operator without a cache, and goes on with the sequences' states instead of
    returning them. A layer calls each of its operators once in a forward.
    """

    @abstractmethod
    def convolve(
        self, x: Tensor, weight: Tensor, cu_seqlens: Tensor, *, bias: Tensor | None, activation: str | None
    ) -> tuple[Tensor, None]:
        """See `short_convolution`."""

    @abstractmethod
    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, cu_seqlens: Tensor, *, normalize: bool,
        backend: str,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """See `gated_delta_rule`."""

    @abstractmethod
    def state_space(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, cu_seqlens: Tensor, *, D_V: Tensor
    ) -> tuple[Tensor, None]:
        """See `state_space_dual`."""
