"""Estimators of the KL divergence between the policy and a reference, from the chosen tokens.

k1, k2 and k3: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_models.losses.ratio import held
from rl_models.losses.terms import same_shape


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    against = held(-log_ratio)
    return torch.expm1(against) - against


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def kl_penalty(log_probs: Tensor, reference_log_probs: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(policy || reference) per token, on tokens drawn from the policy.

    With l = log_probs - reference_log_probs (J. Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html):

        k1 = l                     unbiased, may be negative, high variance
        k2 = l^2 / 2               biased, low variance; its gradient is the unbiased gradient of the divergence
        k3 = exp(-l) - 1 + l       unbiased, never negative, low variance; constant below l = -20

    Args:
        log_probs: `[T]` under the policy.
        reference_log_probs: `[T]` under the reference, a constant.
        estimator: One of `KL_ESTIMATORS`.

    Returns:
        `[T]`, differentiable in `log_probs`.

    Raises:
        ValueError: The estimator is unknown, or the shapes differ.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(KL_ESTIMATORS)}")
    same_shape(log_probs=log_probs, reference_log_probs=reference_log_probs)
    return KL_ESTIMATORS[estimator](log_probs - reference_log_probs.detach())
