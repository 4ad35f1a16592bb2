"""Log-ratios whose exponentials are finite."""

from __future__ import annotations

from torch import Tensor

# e^20 = 4.9e8 leaves room in fp32 for the factors of a ratio.
MAX_LOG_RATIO = 20.0


def held(log_ratio: Tensor) -> Tensor:
    """Cap a log-ratio at 20; a capped log-ratio is a constant without gradient.

    The exponential overflows fp32 beyond 88.7, and infinity times the zero gradient of a clip is NaN.
    """
    return log_ratio.clamp(max=MAX_LOG_RATIO)
