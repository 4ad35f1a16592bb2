"""Importance sampling between the policy that drew the tokens and the policy that learns from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rl_models.batch.rows import sequence_ids
from rl_models.losses.kl import k3
from rl_models.losses.terms import same_shape

# (each token's log-ratio, its sequence's sum, its sequence's number of masked tokens), each [T] -> log-ratio [T]
LEVELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio, total, count: log_ratio,
    "sequence": lambda log_ratio, total, count: total,
    "geometric": lambda log_ratio, total, count: total / count.clamp(min=1),
}
# (ratio [T], whether it lies outside of the bounds [T], cap) -> weight [T]
BOUNDS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "truncate": lambda ratio, outside, cap: ratio.clamp(max=cap),
    "mask": lambda ratio, outside, cap: ratio.masked_fill(outside, 0),
}


class Importance(NamedTuple):
    """Weights `[T]` without gradient, and the effect of the bounds; see `importance_weights`."""

    weights: Tensor
    metrics: dict[str, float]


def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    level: str = "token",
    bound: str = "truncate",
    cap: float = 2.0,
    floor: float = 0.0,
    veto: float = 0.0,
) -> Importance:
    """Compute importance sampling weights between the rollout engine and the trainer.

    With l_t = old_log_probs_t - rollout_log_probs_t, the ratio r_t is

        token       exp(l_t)
        sequence    exp(sum of l over the sequence's masked tokens)
        geometric   exp(mean of l over the sequence's masked tokens), as in GSPO (arXiv:2507.18071)

    and the weight is

        truncate    min(r_t, cap): truncated importance sampling (Espeholt et al. 2018, arXiv:1802.01561; Yao et al.
                    2025, "Your efficient RL framework secretly brings you off-policy RL training")
        mask        r_t if floor <= r_t <= cap, else 0: masked importance sampling (IcePop, arXiv:2510.18855)

    A veto rejects whole sequences: all weights of a sequence with a token of a ratio exp(l_t) below `veto` are 0
    (Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch").

    Multiply a loss by the weights: `ppo_clip(...).weighted(weights)`. Masked tokens still count in the loss's average.

    Args:
        old_log_probs: `[T]` of the trainer, before the update.
        rollout_log_probs: `[T]` of the engine that drew the tokens, with the weights that it had then.
        mask, lengths: The drawn tokens, `[T]` bool, and the lengths of the sequences.
        level, bound: Keys of `LEVELS` and `BOUNDS`.
        cap, floor: The largest and the smallest ratio; the floor is 0 with `truncate`.
        veto: The smallest ratio of a single token, below 1 (0: no veto).

    Returns:
        The weights, and the metrics `importance_outside`, the share of drawn tokens that were truncated or masked;
        `importance_vetoed`, the share of sequences that the veto rejected; `importance_rejected`, the share of
        sequences without any weight, by a mask or the veto; and `importance_sample_size`, the effective sample size
        (sum w)^2 / (T sum w^2) as a share of the T drawn tokens. Sequences without drawn tokens do not count. Without
        any drawn token all metrics are 0.

    Raises:
        ValueError: The shapes differ, the level or the bound is unknown, or cap, floor or veto is out of its range.
    """
    same_shape(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    for name, value, table in (("level", level, LEVELS), ("bound", bound, BOUNDS)):
        if value not in table:
            raise ValueError(f"unknown {name} {value!r}; known: {', '.join(table)}")
    if not cap > 0:
        raise ValueError(f"cap={cap} must be positive")
    if not 0 <= floor <= cap or (floor and bound == "truncate"):
        raise ValueError(f"floor={floor} must lie in [0, cap={cap}], and be 0 where ratios are truncated")
    if not 0 <= veto < 1:
        raise ValueError(f"veto={veto} must lie in [0, 1); sequences with a token of a smaller ratio are rejected")
    mask = mask.bool()
    log_ratio = torch.where(mask, old_log_probs - rollout_log_probs, 0).detach()
    sequence = sequence_ids(lengths, mask)

    def by_sequence(*columns: Tensor) -> Tensor:
        """Sum the columns `[T]` over each sequence, `[len(columns), N]`."""
        stacked = torch.stack([column.to(log_ratio) for column in columns])
        return log_ratio.new_zeros(len(columns), len(lengths)).index_add(1, sequence, stacked)

    ratio = LEVELS[level](log_ratio, *by_sequence(log_ratio, mask)[:, sequence]).exp()
    outside = (ratio > cap) | (ratio < floor)
    vetoed = by_sequence(log_ratio.exp() < veto)[0] > 0
    weights = BOUNDS[bound](ratio, outside, cap).masked_fill(vetoed[sequence], 0)
    has_tokens, has_weight = by_sequence(mask, mask & (weights > 0)) > 0
    drawn = weights[mask].double()
    size = drawn.sum() ** 2 / (len(drawn) * drawn.square().sum()).clamp(min=torch.finfo(torch.float64).tiny)
    return Importance(
        weights,
        {
            "importance_outside": _mean(outside[mask]),
            "importance_vetoed": _mean(vetoed[has_tokens]),
            "importance_rejected": _mean(~has_weight[has_tokens]),
            "importance_sample_size": float(size),
        },
    )


def rollout_mismatch(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """Measure how far the log-probs of the trainer and of the engine that drew the tokens differ.

    Returns:
        Over the masked tokens `rollout_difference` and `rollout_difference_mean`, the largest and the mean absolute
        difference, and `rollout_kl`, KL(engine || trainer) by the estimator k3 (J. Schulman, 2020,
        http://joschu.net/blog/kl-approx.html); 0 without masked tokens.
    """
    same_shape(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    log_ratio = (rollout_log_probs - old_log_probs).detach()[mask.bool()]
    return {
        "rollout_difference": float(log_ratio.abs().max()) if len(log_ratio) else 0.0,
        "rollout_difference_mean": _mean(log_ratio.abs()),
        "rollout_kl": _mean(k3(log_ratio)),
    }


def _mean(values: Tensor) -> float:
    """Return the mean in fp64; 0 of no values."""
    return float(values.double().mean()) if len(values) else 0.0
