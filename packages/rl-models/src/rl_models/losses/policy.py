"""Policy losses: terms `[T]` from the log-probs of the chosen tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_models.batch.rows import sequence_ids
from rl_models.losses.kl import MAX_LOG_RATIO, capped, k3
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
    """Compute the clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7), negated, per token.

        r_t = exp(log_probs_t - old_log_probs_t)
        term_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    The ratio is capped at e^20 and is a constant there, so the term and its gradient are finite for every finite
    log-prob.

    Args:
        log_probs: `[T]` under the policy that learns; receives the gradient.
        old_log_probs: `[T]` under the policy that chose the tokens.
        advantages: `[T]`.
        clip_low, clip_high: The widths of the trust interval. PPO takes equal widths, DAPO 0.2 and 0.28 (Yu et al.
            2025, arXiv:2503.14476).
        dual_clip: c > 1: where A_t < 0, cap the term at -c A_t, so that a large ratio cannot dominate the gradient (Ye
            et al. 2020, arXiv:1912.09729, equation 5). None: the cap of the ratio alone.

    Metrics: `clip_fraction`, the share of tokens whose gradient a bound removed; `approx_kl`, k3 of old against new.

    Raises:
        ValueError: The shapes differ, a clip is negative, or `dual_clip` is not above 1.
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
    """Compute the loss of GSPO (Zheng et al. 2025, arXiv:2507.18071, equations 5 and 13), negated, per token.

    All tokens of a sequence share one clipped ratio, normalised by the length:

        s = exp(mean over the sequence's masked tokens of (log_probs_t - old_log_probs_t))
        term_t = -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t),      s_t = s in value, with the gradient of
                                                                                 s log_probs_t

    The ratio s is capped at e^20, as for `ppo_clip`. With `aggregation="sequence-mean"` and one advantage per sequence,
    the sum of the terms and its gradient follow equation 5.

    Args:
        log_probs, old_log_probs, advantages, clip_low, clip_high: As for `ppo_clip`.
        mask, lengths: The actions, `[T]` bool, and the lengths of the sequences.

    Metrics: `clip_fraction` and `approx_kl`, as for `ppo_clip`, of the sequence ratio.

    Raises:
        ValueError: The shapes or lengths disagree, or a clip is negative.
    """
    same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    mask = mask.bool()
    log_ratio = torch.where(mask, log_probs - old_log_probs.detach(), 0)
    sequence = sequence_ids(lengths, mask)
    sums = log_ratio.detach().new_zeros(2, len(lengths))
    sums.index_add_(1, sequence, torch.stack([log_ratio.detach(), mask.to(log_ratio)]))
    mean_ratio = (sums[0] / sums[1].clamp(min=1))[sequence]
    # The value is the sequence's ratio, to the bit; the gradient flows to the token's own log-prob.
    with_gradient = mean_ratio + (log_ratio - log_ratio.detach())
    return _clipped_surrogate(with_gradient, advantages.detach(), clip_low, clip_high)


def _clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> LossTerms:
    _require_clips(clip_low, clip_high)
    ratio = capped(log_ratio).exp()
    free = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    terms = torch.maximum(free, clipped)
    if dual_clip is not None:
        terms = torch.where(advantages < 0, torch.minimum(terms, -dual_clip * advantages), terms)
    with torch.no_grad():
        constant = (log_ratio > MAX_LOG_RATIO) & (advantages != 0)
        metrics = {"clip_fraction": ((terms != free) | constant).float(), "approx_kl": k3(-log_ratio)}
    return LossTerms(terms, metrics)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> LossTerms:
    """Compute the loss of CISPO (MiniMax 2025, arXiv:2506.13585), negated, per token.

        term_t = -w_t A_t log_probs_t,      w_t = clip(r_t, 1 - clip_low, 1 + clip_high), a constant

    The clip bounds the importance weight, so every token keeps a gradient. The defaults cap the weight at 5 (Khatri et
    al. 2025, arXiv:2510.13786) and have no lower bound.

    Args:
        log_probs, old_log_probs, advantages: As for `ppo_clip`.
        clip_low, clip_high: The widths of the interval of the weight.

    Metrics: `clip_fraction`, the share of tokens whose weight was clipped, and `approx_kl`, as for `ppo_clip`.

    Raises:
        ValueError: The shapes differ, or a clip is negative.
    """
    same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    _require_clips(clip_low, clip_high)
    log_ratio = (log_probs - old_log_probs).detach()
    ratio = capped(log_ratio).exp()
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"clip_fraction": (weights != ratio).float(), "approx_kl": k3(-log_ratio)}
    return LossTerms(-weights * advantages.detach() * log_probs, metrics)


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    temperature: float = 1.0,
    negative_temperature: float = 1.05,
) -> LossTerms:
    """Compute the loss of SAPO (Gao et al. 2025, arXiv:2511.20347), negated, per token.

        term_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t

    A soft gate replaces the clip: the gradient is that of -r_t A_t at r_t = 1, and falls to 0 on both sides.

    Args:
        log_probs, old_log_probs, advantages: As for `ppo_clip`.
        temperature: tau where A_t > 0.
        negative_temperature: tau elsewhere. A larger tau narrows the gate.

    Metrics: `gate`, the gradient's share of that of -r_t A_t, and `approx_kl`, as for `ppo_clip`.

    Raises:
        ValueError: The shapes differ, or a temperature is not positive.
    """
    same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    if not (temperature > 0 and negative_temperature > 0):
        raise ValueError(f"{temperature=} and {negative_temperature=} must be positive")
    log_ratio, advantages = log_probs - old_log_probs.detach(), advantages.detach()
    tau = torch.full_like(log_ratio, negative_temperature).masked_fill(advantages > 0, temperature)
    gate = (tau * (capped(log_ratio).exp() - 1)).sigmoid()
    with torch.no_grad():
        metrics = {"gate": 4 * gate * (1 - gate), "approx_kl": k3(-log_ratio)}
    return LossTerms(-4 / tau * gate * advantages, metrics)


def dro(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, beta: float = 1.0) -> LossTerms:
    """Compute the loss of DRO (Richemond et al. 2024, arXiv:2405.19107), per token.

        term_t = beta / 2 l_t^2 - A_t l_t,      l_t = log_probs_t - old_log_probs_t

    Up to a constant this is (A_t - beta l_t)^2 / (2 beta): the log-ratio learns to be A_t / beta. It needs no
    importance ratio, so the tokens may come from any policy.

    Args:
        log_probs, old_log_probs, advantages: As for `ppo_clip`.
        beta: The strength of the pull towards the policy that chose the tokens.

    Metrics: `approx_kl`, as for `ppo_clip`.

    Raises:
        ValueError: The shapes differ, or beta is not positive.
    """
    same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    if not beta > 0:
        raise ValueError(f"beta={beta} must be positive")
    log_ratio = log_probs - old_log_probs.detach()
    terms = 0.5 * beta * log_ratio.square() - advantages.detach() * log_ratio
    return LossTerms(terms, {"approx_kl": k3(-log_ratio.detach())})


def _require_clips(clip_low: float, clip_high: float) -> None:
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low={clip_low} and clip_high={clip_high} must not be negative")


def entropy_bonus(entropy: Tensor, coefficient: float) -> LossTerms:
    """Return `-coefficient * entropy` per token, with the metric `entropy` (Williams and Peng 1991).

    A positive coefficient keeps the policy from collapsing.
    """
    return LossTerms(-coefficient * entropy, {"entropy": entropy.detach()})
