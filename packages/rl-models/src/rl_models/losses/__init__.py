"""Losses of reinforcement learning, as pure functions of per-token tensors.

Every function takes flat `[T]` tensors, aligned with their tokens (see `rl_models.Batch`), and returns one value per
token. `Actor.update` and `Critic.update` choose the tokens that count and average over micro-batches and data-parallel
ranks, so no function here divides by a number of tokens.
"""

from rl_models.losses.advantages import Advantages, gae, token_rewards, whiten
from rl_models.losses.group import discounted_returns, grpo_advantages, overlong_penalty, rloo_advantages
from rl_models.losses.importance import Importance, importance_weights, rollout_mismatch
from rl_models.losses.kl import KL_ESTIMATORS, kl_penalty
from rl_models.losses.policy import entropy_bonus, gspo_clip, ppo_clip
from rl_models.losses.preference import bradley_terry, dpo
from rl_models.losses.terms import LossTerms
from rl_models.losses.value import value_clip

__all__ = [
    "KL_ESTIMATORS",
    "Advantages",
    "Importance",
    "LossTerms",
    "bradley_terry",
    "discounted_returns",
    "dpo",
    "entropy_bonus",
    "gae",
    "grpo_advantages",
    "gspo_clip",
    "importance_weights",
    "kl_penalty",
    "overlong_penalty",
    "ppo_clip",
    "rloo_advantages",
    "rollout_mismatch",
    "token_rewards",
    "value_clip",
    "whiten",
]
