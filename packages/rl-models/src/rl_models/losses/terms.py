"""`LossTerms`: the result of a loss, one number per token to minimise and named numbers to report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """Loss terms and metrics per token; terms add: `ppo_clip(...) + entropy_bonus(entropy, 0.01)`.

    `update` averages both in the same way over the same tokens, so metrics are exact for any micro-batches.

    Attributes:
        loss: `[T]`.
        metrics: Each `[T]`, or one number for all tokens.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)

    def __add__(self, other: LossTerms) -> LossTerms:
        if twice := self.metrics.keys() & other.metrics.keys():
            raise ValueError(f"two loss terms report the same metrics {sorted(twice)}; rename them in one of the two")
        return LossTerms(self.loss + other.loss, {**self.metrics, **other.metrics})

    def __mul__(self, scale: float) -> LossTerms:
        return LossTerms(self.loss * scale, self.metrics)

    __rmul__ = __mul__

    def weighted(self, weights: Tensor) -> LossTerms:
        """Multiply the terms by constants `[T]`, such as `importance_weights`, and report these as `weight`."""
        same_shape(loss=self.loss, weights=weights)
        return LossTerms(self.loss * weights.detach(), {**self.metrics, "weight": weights.detach()})


def require_tensors(**values: object) -> None:
    """Raise ValueError unless all values are tensors."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}; use torch.tensor({name})")


def same_shape(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have one shape: broadcasting `[T]` against `[T, 1]` hides a mistake."""
    require_tensors(**tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name}{shape}" for name, shape in shapes.items())
        raise ValueError(f"per-token tensors must have one shape, got {listed}")
