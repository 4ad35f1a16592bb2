"""The table of algorithms: how advantages follow from scores, and which loss the policy learns by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_models import losses
from rl_models.batch import Batch
from rl_models.losses import LossTerms
from rl_models.losses.aggregation import AGGREGATIONS


@dataclass(frozen=True)
class Rules:
    """The numbers of one run that the advantages and the losses read.

    Attributes:
        surrogate: A key of `SURROGATES`.
        clip_low, clip_high: Clip the policy's ratio to [1 - clip_low, 1 + clip_high].
        kl_in_loss: Coefficient of the KL penalty in the loss.
        kl_in_reward: Coefficient of the KL penalty in the reward.
        kl_estimator: Estimator of the KL penalty, a key of `losses.KL_ESTIMATORS`.
        entropy: Coefficient of the entropy bonus.
        dual_clip: See `losses.ppo_clip`; None: off.
        value_clip: Largest change of the critic's values in its clipped loss; None: off.
        value_coefficient: Coefficient of the critic's loss where it shares a backbone with the policy.
        importance_cap: Cap of `losses.importance_weights`, p_train / p_rollout; None: no weights.
        aggregation: Average of the policy's loss, a key of `rl_models.losses.aggregation.AGGREGATIONS`.
        gamma, lam: Discount and lambda of the advantages over time.

    Raises:
        ValueError: A name is unknown, or a number outside its range.
    """

    surrogate: str
    clip_low: float
    clip_high: float
    kl_in_loss: float = 0.0
    kl_in_reward: float = 0.0
    kl_estimator: str = "k3"
    entropy: float = 0.0
    dual_clip: float | None = None
    value_clip: float | None = 0.2
    value_coefficient: float = 0.5
    importance_cap: float | None = None
    aggregation: str = "token-mean"
    gamma: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        for name, known in (("kl_estimator", losses.KL_ESTIMATORS), ("aggregation", AGGREGATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(known)}")
        if self.kl_in_loss and self.kl_estimator == "k1":
            raise ValueError("kl_estimator='k1' has no gradient on average, so a loss needs k2 or k3")
        if self.dual_clip is not None and not (self.dual_clip > 1 and self.surrogate == "ppo"):
            raise ValueError(f"dual_clip={self.dual_clip} must be above 1 and needs the surrogate of PPO, not gspo")
        for name in ("clip_low", "clip_high"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.importance_cap is not None and not self.importance_cap > 0:
            raise ValueError(f"importance_cap={self.importance_cap} must be above 0")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1]")


# (batch, scores [N], groups [N], rules) -> fields [T] of the batch: `advantages`, and `returns` for a critic.
Estimate = Callable[[Batch, Tensor, Tensor, Rules], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Algorithm:
    """One row of `ALGORITHMS`.

    Attributes:
        estimate: Returns the fields that the losses read, from the scores of the responses.
        source: The paper.
        surrogate: The policy's loss, a key of `SURROGATES`.
        aggregation: Average of the loss's terms (`rl_models.losses.aggregation`).
        clip_low, clip_high: Default clip interval of the policy's ratio.
        kl: Place of the KL penalty: in the reward (default estimator k1) or in the loss (k3).
        critic: Whether the algorithm needs a critic.
        samples: Default number of responses to each prompt.
        groups: Whether the responses to a prompt are compared, which needs at least two.
        dynamic_sampling: Whether prompts whose responses all have the same score are replaced.
    """

    estimate: Estimate
    source: str
    surrogate: str = "ppo"
    aggregation: str = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: Literal["reward", "loss"] = "reward"
    critic: bool = False
    samples: int = 1
    groups: bool = False
    dynamic_sampling: bool = False


def _rewards(batch: Batch, scores: Tensor, rules: Rules) -> Tensor:
    penalty = None
    if rules.kl_in_reward:
        penalty = losses.kl_penalty(batch["old_log_probs"], batch["reference_log_probs"], rules.kl_estimator)
    return losses.token_rewards(scores, batch.mask, batch.lengths, penalty=penalty, coefficient=rules.kl_in_reward)


def _gae(batch: Batch, scores: Tensor, groups: Tensor, rules: Rules) -> Mapping[str, Tensor]:
    rewards = _rewards(batch, scores, rules)
    found = losses.gae(rewards, batch["old_values"], batch.mask, batch.lengths, gamma=rules.gamma, lam=rules.lam)
    return {"advantages": losses.whiten(found.advantages, batch.mask), "returns": found.returns}


def _returns(batch: Batch, scores: Tensor, groups: Tensor, rules: Rules) -> Mapping[str, Tensor]:
    returns = losses.discounted_returns(_rewards(batch, scores, rules), batch.mask, batch.lengths, gamma=rules.gamma)
    return {"advantages": losses.whiten(returns, batch.mask)}


def _leave_one_out(batch: Batch, scores: Tensor, groups: Tensor, rules: Rules) -> Mapping[str, Tensor]:
    # The reward of a whole response includes the KL penalty.
    totals = batch.sum_by_sequence(_rewards(batch, scores, rules))
    return {"advantages": _per_token(batch, losses.rloo_advantages(totals, groups))}


def _group_relative(batch: Batch, scores: Tensor, groups: Tensor, rules: Rules) -> Mapping[str, Tensor]:
    return {"advantages": _per_token(batch, losses.grpo_advantages(scores, groups))}


def _per_token(batch: Batch, per_sequence: Tensor) -> Tensor:
    return torch.where(batch.mask, per_sequence[batch.sequence_ids], 0)


ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(_gae, "Schulman et al. 2017, arXiv:1707.06347", critic=True),
    "grpo": Algorithm(
        _group_relative,
        "Shao et al. 2024, arXiv:2402.03300",
        aggregation="sequence-mean",
        kl="loss",
        samples=8,
        groups=True,
    ),
    "rloo": Algorithm(_leave_one_out, "Ahmadian et al. 2024, arXiv:2402.14740", samples=4, groups=True),
    "reinforce++": Algorithm(_returns, "Hu 2025, arXiv:2501.03262"),
    "gspo": Algorithm(
        _group_relative,
        "Zheng et al. 2025, arXiv:2507.18071",
        surrogate="gspo",
        aggregation="sequence-mean",
        clip_low=3e-4,
        clip_high=4e-4,
        kl="loss",
        samples=8,
        groups=True,
    ),
    "dapo": Algorithm(
        _group_relative,
        "Yu et al. 2025, arXiv:2503.14476",
        clip_high=0.28,
        kl="loss",
        samples=8,
        groups=True,
        dynamic_sampling=True,
    ),
}


def _ppo(rules: Rules, log_probs: Tensor, batch: Batch) -> LossTerms:
    return losses.ppo_clip(
        log_probs,
        batch["old_log_probs"],
        batch["advantages"],
        clip_low=rules.clip_low,
        clip_high=rules.clip_high,
        dual_clip=rules.dual_clip,
    )


def _gspo(rules: Rules, log_probs: Tensor, batch: Batch) -> LossTerms:
    return losses.gspo_clip(
        log_probs,
        batch["old_log_probs"],
        batch["advantages"],
        batch.mask,
        batch.lengths,
        clip_low=rules.clip_low,
        clip_high=rules.clip_high,
    )


SURROGATES: dict[str, Callable[[Rules, Tensor, Batch], LossTerms]] = {"ppo": _ppo, "gspo": _gspo}


def policy_loss(rules: Rules, log_probs: Tensor, entropy: Tensor, batch: Batch) -> LossTerms:
    """Add up the surrogate, the KL penalty and the entropy bonus."""
    terms = SURROGATES[rules.surrogate](rules, log_probs, batch)
    if rules.importance_cap is not None:
        # `log_probs` of a batch come from generation, `old_log_probs` from training.
        weights = losses.importance_weights(batch["old_log_probs"], batch["log_probs"], cap=rules.importance_cap)
        terms = terms.weighted(weights)
    terms += losses.entropy_bonus(entropy, rules.entropy)
    if rules.kl_in_loss:
        penalty = losses.kl_penalty(log_probs, batch["reference_log_probs"], rules.kl_estimator)
        terms += LossTerms(rules.kl_in_loss * penalty)
    return terms


def value_loss(rules: Rules, values: Tensor, batch: Batch) -> LossTerms:
    """Return the critic's clipped loss."""
    return losses.value_clip(values, batch["old_values"], batch["returns"], clip=rules.value_clip)


def joint_loss(rules: Rules, log_probs: Tensor, entropy: Tensor, values: Tensor, batch: Batch) -> LossTerms:
    """Add up the losses of policy and critic on one backbone (Schulman et al. 2017, arXiv:1707.06347, equation 9)."""
    of_critic = value_loss(rules, values, batch)
    metrics = {f"critic_{name}": metric for name, metric in of_critic.metrics.items()}
    metrics["critic_loss"] = of_critic.loss.detach()
    return policy_loss(rules, log_probs, entropy, batch) + rules.value_coefficient * LossTerms(of_critic.loss, metrics)
