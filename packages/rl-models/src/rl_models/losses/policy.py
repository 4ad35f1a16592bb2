"""Policy losses: terms `[T]` from the log-probabilities of the tokens that were chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_models.losses.ratio import MAX_LOG_RATIO, held
from rl_models.losses.sequences import sequence_ids
from rl_models.losses.terms import LossTerms, same_shape


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossTerms:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7), negated, per token.

        r_t = exp(log_probs_t - old_log_probs_t)
        term_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    A ratio is at most e^20, beyond which it is a constant: where A_t < 0 and nothing clips from above, as if
    `dual_clip` were e^20. So the term and its gradient are finite for every finite log-probability.

    Args:
        log_probs: `[T]` under the policy that learns; the only input that receives a gradient.
        old_log_probs: `[T]` under the policy that chose the tokens.
        advantages: `[T]`.
        clip_low, clip_high: the trust interval; equal in PPO, `clip_high` larger in DAPO (Yu et al. 2025,
            arXiv:2503.14476: 0.2 and 0.28, with `aggregation="token-mean"`).
        dual_clip: c > 1: where A_t < 0 the term is at most -c A_t, so that a ratio that has run away can not dominate
            the gradient (Ye et al. 2020, arXiv:1912.09729, equation 5); None: no bound but that of the ratio.

    Metrics: `clip_fraction`, the tokens whose gradient a bound removed; `approx_kl`, k3 of old against new, constant
    where the ratio is.

    Raises:
        ValueError: if the shapes differ, a clip is negative, or `dual_clip` is not above 1.
    """
    same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip} must be above 1; None leaves it out")
    log_ratio = log_probs - old_log_probs.detach()
    return _clipped_surrogate(log_ratio, advantages.detach(), clip_low, clip_high, dual_clip)


def gspo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossTerms:
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071, equations 5 and 13), negated, per token.

    The ratio is that of whole sequences, length-normalised, and one ratio is clipped for all tokens of a sequence:

        s = exp(mean over the sequence's masked tokens of (log_probs_t - old_log_probs_t))
        term_t = -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t),      s_t = s in value, with the gradient of
                                                                                 s log_probs_t

    and s is at most e^20, as for `ppo_clip`.

    With `aggregation="sequence-mean"` and one advantage a sequence, the sum of the terms is the objective of equation 5
    and has its gradient.

    Args:
        log_probs, old_log_probs, advantages: `[T]`.
        mask: `[T]` bool; lengths: of the sequences.
        clip_low, clip_high: the trust interval of the sequence ratio.

    Metrics: as for `ppo_clip`, `approx_kl` being k3 of the sequence ratio.

    Raises:
        ValueError: if the shapes or lengths disagree, or a clip is negative.
    """
    same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    mask = mask.bool()
    log_ratio = torch.where(mask, log_probs - old_log_probs.detach(), 0)
    sequence = sequence_ids(lengths, mask)
    sums = log_ratio.detach().new_zeros(2, len(lengths))
    sums.index_add_(1, sequence, torch.stack([log_ratio.detach(), mask.to(log_ratio)]))
    of_sequence = (sums[0] / sums[1].clamp(min=1))[sequence]
    # The sequence's ratio, to the bit, with the gradient of the token's own log-probability.
    with_gradient = of_sequence + (log_ratio - log_ratio.detach())
    return _clipped_surrogate(with_gradient, advantages.detach(), clip_low, clip_high, None)


def _clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> LossTerms:
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low={clip_low} and clip_high={clip_high} must not be negative")
    ratio = held(log_ratio).exp()
    free = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    terms = torch.maximum(free, clipped)
    if dual_clip is not None:
        terms = torch.where(advantages < 0, torch.minimum(terms, -dual_clip * advantages), terms)
    with torch.no_grad():
        constant = (log_ratio > MAX_LOG_RATIO) & (advantages != 0)
        metrics = {
            "clip_fraction": ((terms != free) | constant).float(),
            "approx_kl": torch.expm1(held(log_ratio)) - held(log_ratio),
        }
    return LossTerms(terms, metrics)


def importance_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, *, cap: float = 2.0) -> Tensor:
    """Truncated importance sampling for the mismatch between the engine that drew the tokens and the trainer.

        w_t = min(exp(old_log_probs_t - rollout_log_probs_t), cap)

    (Espeholt et al. 2018, arXiv:1802.01561, the truncation of V-trace; Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"). Multiply a loss by it: `ppo_clip(...).weighted(w)`.

    Args:
        old_log_probs: `[T]` by the trainer, before the update.
        rollout_log_probs: `[T]` by the engine, when it drew the tokens.
        cap: the largest weight.

    Returns:
        `[T]` without gradient.

    Raises:
        ValueError: if the shapes differ or the cap is not positive.
    """
    same_shape(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    if not cap > 0:
        raise ValueError(f"cap={cap} must be positive")
    return (old_log_probs - rollout_log_probs).detach().exp().clamp(max=cap)


def entropy_bonus(entropy: Tensor, coefficient: float) -> LossTerms:
    """`-coefficient * entropy` per token: a positive coefficient keeps the policy from collapsing.

    Williams and Peng 1991, "Function optimization using connectionist reinforcement learning algorithms".
    Metric: `entropy`.
    """
    return LossTerms(-coefficient * entropy, {"entropy": entropy.detach()})
