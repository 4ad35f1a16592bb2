"""The advantages of responses, and the losses of policy and critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor

from rl_models import Batch, LossInputs, losses
from rl_models.losses import LossTerms
from rl_train.options.functions import imported
from rl_train.options.options import TrainOptions
from rl_train.trajectories.episodes import EPISODE_WEIGHTS, episode_ids, of_episodes, sum_by_episode

# (batch, scores [N], groups [N], options) -> fields [T] of the batch: `advantages`, and `returns` for a critic.
Estimate = Callable[[Batch, Tensor, Tensor, TrainOptions], Mapping[str, Tensor]]


def _rewards(batch: Batch, scores: Tensor, options: TrainOptions) -> Tensor:
    coefficient, estimator, penalty = options.objective.kl_coefficient, options.objective.kl_estimator, None
    if coefficient:
        penalty = losses.kl_penalty(batch["old_log_probs"], batch["reference_log_probs"], estimator)
    return losses.token_rewards(scores, batch.mask, batch.lengths, penalty=penalty, coefficient=coefficient)


def _gae(batch: Batch, scores: Tensor, groups: Tensor, options: TrainOptions) -> Mapping[str, Tensor]:
    rewards, gamma, lam = _rewards(batch, scores, options), options.objective.gamma, options.objective.lam
    estimates = losses.gae(rewards, batch["old_values"], batch.mask, batch.lengths, gamma=gamma, lam=lam)
    return {"advantages": _whiten(batch, estimates.advantages), "returns": estimates.returns}


def _returns(batch: Batch, scores: Tensor, groups: Tensor, options: TrainOptions) -> Mapping[str, Tensor]:
    rewards = _rewards(batch, scores, options)
    returns = losses.discounted_returns(rewards, batch.mask, batch.lengths, gamma=options.objective.gamma)
    return {"advantages": _whiten(batch, returns)}


def _whiten(batch: Batch, per_token: Tensor) -> Tensor:
    """Whiten over the responses that are not rejected."""
    return losses.whiten(per_token, batch.mask & _accepted(batch)[batch.sequence_ids])


def _leave_one_out(batch: Batch, scores: Tensor, groups: Tensor, options: TrainOptions) -> Mapping[str, Tensor]:
    # The reward of a whole episode includes the KL penalty, and its score once.
    penalties = batch.sum_by_sequence(_rewards(batch, scores, options)) - scores
    totals = scores + sum_by_episode(batch, penalties)[episode_ids(batch)]
    return _compared(batch, totals, groups, losses.rloo_advantages)


def _teacher(batch: Batch, scores: Tensor, groups: Tensor, options: TrainOptions) -> Mapping[str, Tensor]:
    # The gradient of the reverse KL on tokens of the policy's own, by the score function; scores are metrics alone.
    # A divergence over the whole vocabulary needs no advantages.
    old = batch["old_log_probs"]
    return {"advantages": torch.where(batch.mask, batch.fields.get("reference_log_probs", old) - old, 0)}


def _accepted(batch: Batch) -> Tensor:
    """Say for each response whether any of its tokens has an importance weight, `[N]`."""
    weights = batch.fields.get("importance_weights")
    return torch.ones(len(batch)).bool() if weights is None else batch.sum_by_sequence((weights > 0).float()) > 0


def _compared(
    batch: Batch, scores: Tensor, groups: Tensor, compare: Callable[[Tensor, Tensor], Tensor]
) -> Mapping[str, Tensor]:
    """Compare the accepted episodes of each group; rejected episodes and single ones get 0."""
    accepted = sum_by_episode(batch, _accepted(batch).float()) > 0
    scores, groups, ids = of_episodes(batch, scores), of_episodes(batch, groups), episode_ids(batch)
    siblings = torch.bincount(groups[accepted], minlength=int(groups.max()) + 1)[groups] > 1
    kept = accepted & siblings
    advantages = torch.zeros(len(scores))
    advantages[kept] = compare(scores[kept], groups[kept])
    return {"advantages": torch.where(batch.mask, advantages[ids][batch.sequence_ids], 0)}


def _by_scores(compare: Callable[[Tensor, Tensor], Tensor]) -> Estimate:
    """Return an estimate that compares the scores of each group alone."""
    return lambda batch, scores, groups, options: _compared(batch, scores, groups, compare)


ADVANTAGES: dict[str, Estimate] = {
    "gae": _gae,
    "group-centred": _by_scores(partial(losses.grpo_advantages, scale=False)),
    "group-relative": _by_scores(losses.grpo_advantages),
    "leave-one-out": _leave_one_out,
    "returns": _returns,
    "teacher": _teacher,
}


def advantages_of(name: str) -> Estimate:
    """Return a function of `ADVANTAGES`, or import `module:function`."""
    takes = "(batch, scores, groups, options) and returns a mapping with the tensor [T] of advantages"
    estimate: Estimate = ADVANTAGES.get(name) or imported("advantages", name, tuple(ADVANTAGES), takes)
    return estimate


def advantages(options: TrainOptions, batch: Batch, scores: Tensor, groups: Tensor) -> Mapping[str, Tensor]:
    """Return the fields that learning needs: `advantages` `[T]`, and with a critic `returns` `[T]`.

    Args:
        options: The options of the run.
        batch: The responses of a step, with the fields of `Models.estimate`.
        scores: The score of each response, `[N]`; the samples of an episode have equal scores.
        groups: The number of each response's prompt, `[N]`.
    """
    name_of_estimate = options.objective.advantages
    estimates = advantages_of(name_of_estimate)(batch, scores, groups, options)
    estimated_fields = estimates if isinstance(estimates, Mapping) else {}
    for name in ("advantages", "returns") if options.rule.critic else ("advantages",):
        field = estimated_fields.get(name)
        if not isinstance(field, Tensor) or field.shape != (batch.num_tokens,):
            got = list(field.shape) if isinstance(field, Tensor) else estimates
            raise ValueError(
                f"advantages={name_of_estimate}: {name!r} must be a tensor [T={batch.num_tokens}], got {got!s:.80}; "
                f"return {{{name!r}: tensor}}"
            )
    return estimates


# The terms `[T]` of a micro-batch, without metrics a tensor.
Loss = Callable[[LossInputs, TrainOptions], LossTerms | Tensor]


def _compared_policies(inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading arguments of all losses that compare the policy with the one that drew the tokens."""
    return inputs.log_probs, inputs["old_log_probs"], inputs["advantages"]


class _Clip(TypedDict):
    clip_low: float
    clip_high: float


def _clip(options: TrainOptions) -> _Clip:
    return {"clip_low": options.objective.clip_low, "clip_high": options.objective.clip_high}


def _ppo(inputs: LossInputs, options: TrainOptions) -> LossTerms:
    return losses.ppo_clip(*_compared_policies(inputs), **_clip(options), dual_clip=options.objective.dual_clip)


def _gspo(inputs: LossInputs, options: TrainOptions) -> LossTerms:
    batch = inputs.batch
    return losses.gspo_clip(*_compared_policies(inputs), batch.mask, batch.lengths, **_clip(options))


def _cispo(inputs: LossInputs, options: TrainOptions) -> LossTerms:
    return losses.cispo(*_compared_policies(inputs), **_clip(options))


def _sapo(inputs: LossInputs, options: TrainOptions) -> LossTerms:
    return losses.sapo(*_compared_policies(inputs))


def _dro(inputs: LossInputs, options: TrainOptions) -> LossTerms:
    return losses.dro(*_compared_policies(inputs), beta=options.objective.dro_beta)


LOSSES: dict[str, Loss] = {"ppo": _ppo, "gspo": _gspo, "cispo": _cispo, "sapo": _sapo, "dro": _dro}


def loss_of(name: str) -> Loss:
    """Return a loss of `LOSSES`, or import `module:function`."""
    takes = "(inputs, options) and returns one term per token, LossTerms or a tensor"
    loss: Loss = LOSSES.get(name) or imported("loss", name, tuple(LOSSES), takes)
    return loss


def policy_loss(options: TrainOptions, inputs: LossInputs) -> LossTerms:
    """Add up the loss of the policy (`--loss`), the KL penalty and the entropy bonus."""
    objective = options.objective
    if objective.divergence is None:
        terms = loss_of(objective.loss)(inputs, options)
    else:
        terms = LossTerms(inputs["divergence"], {"kl": inputs["divergence"].detach()})
    if isinstance(terms, Tensor):
        terms = LossTerms(terms)
    if not isinstance(terms, LossTerms):
        raise ValueError(
            f"loss={objective.loss} returned {type(terms).__name__}; return one term per token, a tensor or "
            "rl_models.losses.LossTerms(tensor)"
        )
    if objective.importance.cap is not None:
        terms = terms.weighted(inputs["importance_weights"])
    terms += losses.entropy_bonus(inputs.entropy, objective.entropy_coefficient)
    if objective.kl_coefficient and options.rule.kl == "loss":
        penalty = losses.kl_penalty(inputs.log_probs, inputs["reference_log_probs"], objective.kl_estimator)
        terms += LossTerms(objective.kl_coefficient * penalty)
    if EPISODE_WEIGHTS in inputs.batch.fields:
        terms = LossTerms(terms.loss * inputs[EPISODE_WEIGHTS], terms.metrics)
    # Dr. GRPO divides sums over tokens by a constant.
    return terms if objective.aggregation != "sequence-sum" else terms * (1 / options.sampling.max_new_tokens)


def value_loss(options: TrainOptions, inputs: LossInputs) -> LossTerms:
    """Return the critic's clipped loss."""
    return losses.value_clip(
        inputs.values, inputs["old_values"], inputs["returns"], clip=options.critic.value_clip or None
    )


def joint_loss(options: TrainOptions, inputs: LossInputs) -> LossTerms:
    """Add up the losses of policy and critic on one backbone (Schulman et al. 2017, arXiv:1707.06347, equation 9)."""
    critic_terms = value_loss(options, inputs)
    metrics = {f"critic_{name}": metric for name, metric in critic_terms.metrics.items()}
    metrics["critic_loss"] = critic_terms.loss.detach()
    weighted = options.critic.value_coefficient * LossTerms(critic_terms.loss, metrics)
    return policy_loss(options, inputs) + weighted
