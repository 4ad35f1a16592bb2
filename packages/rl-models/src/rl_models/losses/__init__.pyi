from rl_models.losses.advantages import gae as gae, token_rewards as token_rewards, whiten as whiten
from rl_models.losses.group import (
    discounted_returns as discounted_returns,
    grpo_advantages as grpo_advantages,
    overlong_penalty as overlong_penalty,
    rloo_advantages as rloo_advantages,
)
from rl_models.losses.importance import (
    BOUNDS as BOUNDS,
    LEVELS as LEVELS,
    importance_weights as importance_weights,
    rollout_mismatch as rollout_mismatch,
)
from rl_models.losses.kl import kl_penalty as kl_penalty
from rl_models.losses.policy import (
    cispo as cispo,
    dro as dro,
    entropy_bonus as entropy_bonus,
    gspo_clip as gspo_clip,
    ppo_clip as ppo_clip,
    sapo as sapo,
)
from rl_models.losses.preference import bradley_terry as bradley_terry, dpo as dpo, kto as kto, simpo as simpo
from rl_models.losses.terms import LossTerms as LossTerms
from rl_models.losses.value import label_cross_entropy as label_cross_entropy, value_clip as value_clip
