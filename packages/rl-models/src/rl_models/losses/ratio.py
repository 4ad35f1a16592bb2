"""Log-ratios whose exponentials are finite."""

from __future__ import annotations

from torch import Tensor

# e^20 = 4.9e8 leaves room in fp32 for whatever a ratio is multiplied by; the bound is verl's, too.
MAX_LOG_RATIO = 20.0


def held(log_ratio: Tensor) -> Tensor:
    """A log-ratio, at most 20; above that it is a constant, without gradient.

    The exponential overflows fp32 beyond 88.7, and then infinity times an advantage, or times the zero gradient of a
    clip, is NaN.
    """
    return log_ratio.clamp(max=MAX_LOG_RATIO)
