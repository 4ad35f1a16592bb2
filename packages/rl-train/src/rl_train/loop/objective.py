"""The advantages of responses, and the losses of policy and critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl_models import losses
from rl_models.batch import Batch
from rl_models.losses import LossTerms
from rl_train.options.options import TrainOptions

# (batch, scores [N], groups [N], options) -> fields [T] of the batch: `advantages`, and `returns` for a critic.
Estimate = Callable[[Batch, Tensor, Tensor, TrainOptions], Mapping[str, Tensor]]


def _rewards(batch: Batch, scores: Tensor, options: TrainOptions) -> Tensor:
    penalty = None
    if options.kl_coefficient:
        penalty = losses.kl_penalty(batch["old_log_probs"], batch["reference_log_probs"], options.kl_estimator)
    return losses.token_rewards(scores, batch.mask, batch.lengths, penalty=penalty, coefficient=options.kl_coefficient)


def _gae(batch: Batch, scores: Tensor, groups: Tensor, options: TrainOptions) -> Mapping[str, Tensor]:
    rewards = _rewards(batch, scores, options)
    found = losses.gae(rewards, batch["old_values"], batch.mask, batch.lengths, gamma=options.gamma, lam=options.lam)
    return {"advantages": losses.whiten(found.advantages, batch.mask), "returns": found.returns}


def _returns(batch: Batch, scores: Tensor, groups: Tensor, options: TrainOptions) -> Mapping[str, Tensor]:
    rewards = _rewards(batch, scores, options)
    returns = losses.discounted_returns(rewards, batch.mask, batch.lengths, gamma=options.gamma)
    return {"advantages": losses.whiten(returns, batch.mask)}


def _leave_one_out(batch: Batch, scores: Tensor, groups: Tensor, options: TrainOptions) -> Mapping[str, Tensor]:
    # The reward of a whole response includes the KL penalty.
    totals = batch.sum_by_sequence(_rewards(batch, scores, options))
    return {"advantages": _per_token(batch, losses.rloo_advantages(totals, groups))}


def _group_relative(batch: Batch, scores: Tensor, groups: Tensor, options: TrainOptions) -> Mapping[str, Tensor]:
    return {"advantages": _per_token(batch, losses.grpo_advantages(scores, groups))}


def _per_token(batch: Batch, per_sequence: Tensor) -> Tensor:
    return torch.where(batch.mask, per_sequence[batch.sequence_ids], 0)


ADVANTAGES: dict[str, Estimate] = {
    "gae": _gae,
    "group-relative": _group_relative,
    "leave-one-out": _leave_one_out,
    "returns": _returns,
}


def _ppo(options: TrainOptions, log_probs: Tensor, batch: Batch) -> LossTerms:
    return losses.ppo_clip(
        log_probs,
        batch["old_log_probs"],
        batch["advantages"],
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )


def _gspo(options: TrainOptions, log_probs: Tensor, batch: Batch) -> LossTerms:
    return losses.gspo_clip(
        log_probs,
        batch["old_log_probs"],
        batch["advantages"],
        batch.mask,
        batch.lengths,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
    )


SURROGATES: dict[str, Callable[[TrainOptions, Tensor, Batch], LossTerms]] = {"ppo": _ppo, "gspo": _gspo}


def policy_loss(options: TrainOptions, log_probs: Tensor, entropy: Tensor, batch: Batch) -> LossTerms:
    """Add up the surrogate, the KL penalty and the entropy bonus."""
    terms = SURROGATES[options.rule.surrogate](options, log_probs, batch)
    if options.importance_cap is not None:
        terms = terms.weighted(batch["importance_weights"])
    terms += losses.entropy_bonus(entropy, options.entropy_coefficient)
    if options.kl_coefficient and options.rule.kl == "loss":
        penalty = losses.kl_penalty(log_probs, batch["reference_log_probs"], options.kl_estimator)
        terms += LossTerms(options.kl_coefficient * penalty)
    return terms


def value_loss(options: TrainOptions, values: Tensor, batch: Batch) -> LossTerms:
    """Return the critic's clipped loss."""
    return losses.value_clip(values, batch["old_values"], batch["returns"], clip=options.value_clip or None)


def joint_loss(options: TrainOptions, log_probs: Tensor, entropy: Tensor, values: Tensor, batch: Batch) -> LossTerms:
    """Add up the losses of policy and critic on one backbone (Schulman et al. 2017, arXiv:1707.06347, equation 9)."""
    of_critic = value_loss(options, values, batch)
    metrics = {f"critic_{name}": metric for name, metric in of_critic.metrics.items()}
    metrics["critic_loss"] = of_critic.loss.detach()
    weighted = options.value_coefficient * LossTerms(of_critic.loss, metrics)
    return policy_loss(options, log_probs, entropy, batch) + weighted
