"""The value loss of the critic."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_models.losses.terms import LossTerms, same_shape


def value_clip(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> LossTerms:
    """Compute half the squared error of the value, clipped around the old value, per token.

        term_t = 1/2 max((V_t - R_t)^2, (V_old_t + clip(V_t - V_old_t, -clip, clip) - R_t)^2)

    (Engstrom et al. 2020, arXiv:2005.12729, section 3, after the reference code of PPO.) The maximum of the two errors
    removes the gradient only where the value has already moved by `clip` in the right direction.

    Args:
        values: `[T]`, the value of the state before each token; receives the gradient.
        old_values: `[T]`, these values when the advantages were computed.
        returns: `[T]`, the targets (`gae(...).returns`).
        clip: The half-width of the interval. None: the plain squared error.

    Metrics: `value_clip_fraction`, and `value_error` (V - R)^2.

    Raises:
        ValueError: The shapes differ, or the clip is negative.
    """
    same_shape(values=values, old_values=old_values, returns=returns)
    if clip is not None and not clip >= 0:
        raise ValueError(f"clip={clip} must not be negative; use None for an unclipped value loss")
    old_values, returns = old_values.detach(), returns.detach()
    free = (values - returns).square()
    if clip is None:
        clipped = free
    else:
        clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    with torch.no_grad():
        metrics = {"value_clip_fraction": (clipped > free).float(), "value_error": free.detach()}
    return LossTerms(0.5 * torch.maximum(free, clipped), metrics)
