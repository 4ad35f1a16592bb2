"""Estimators of the KL divergence between the policy and a reference, from the chosen tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_models.losses.terms import same_shape

# e^20 = 4.9e8 leaves room in fp32 for the factors of a ratio.
MAX_LOG_RATIO = 20.0


def capped(log_ratio: Tensor) -> Tensor:
    """Cap a log-ratio at 20; a capped log-ratio is a constant without gradient.

    The exponential overflows fp32 beyond 88.7, and infinity times the zero gradient of a clip is NaN.
    """
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def k3(log_ratio: Tensor) -> Tensor:
    """Compute exp(-l) - 1 + l, constant below l = -20."""
    negated = capped(-log_ratio)
    return torch.expm1(negated) - negated


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": k3,
}


def kl_penalty(log_probs: Tensor, reference_log_probs: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(policy || reference) per token, on tokens drawn from the policy.

    With l = log_probs - reference_log_probs (J. Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html):

        k1 = l                     unbiased, may be negative, high variance
        k2 = l^2 / 2               biased, low variance; its gradient is the unbiased gradient of the divergence
        k3 = exp(-l) - 1 + l       unbiased, never negative, low variance; constant below l = -20

    All are `[T]`; the result is differentiable in `log_probs`, and the reference is a constant.

    Raises:
        ValueError: The estimator is no key of `KL_ESTIMATORS`, or the shapes differ.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(KL_ESTIMATORS)}")
    same_shape(log_probs=log_probs, reference_log_probs=reference_log_probs)
    return KL_ESTIMATORS[estimator](log_probs - reference_log_probs.detach())
