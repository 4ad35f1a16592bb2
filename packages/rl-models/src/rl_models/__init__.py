"""Sharded actors and critics for reinforcement learning on language models, from a Hugging Face checkpoint and back."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_models import losses
    from rl_models.actor import Actor, TokenLogProbs
    from rl_models.actor_critic import ActorCritic, TokenEstimates
    from rl_models.backends.options import MegatronOptions, PipelineOptions, RouterLosses
    from rl_models.batch import Batch
    from rl_models.cluster.future import RankDied
    from rl_models.cluster.group import RayModelGroup
    from rl_models.cluster.placement import Placement
    from rl_models.cluster.resources import Resources
    from rl_models.config import ModelConfig
    from rl_models.critic import Critic
    from rl_models.grid import Grid
    from rl_models.models import CausalLM, CausalLMWithValue, ValueModel
    from rl_models.optimizer import OptimizerOptions

__all__ = [
    "Actor",
    "ActorCritic",
    "Batch",
    "CausalLM",
    "CausalLMWithValue",
    "Critic",
    "Grid",
    "MegatronOptions",
    "ModelConfig",
    "OptimizerOptions",
    "PipelineOptions",
    "Placement",
    "RankDied",
    "RayModelGroup",
    "Resources",
    "RouterLosses",
    "TokenEstimates",
    "TokenLogProbs",
    "ValueModel",
    "losses",
]

# Where each name lives. Imported when it is first asked for: `rl-models --help` need not wait for torch.
_HOME = {
    "Actor": "rl_models.actor",
    "ActorCritic": "rl_models.actor_critic",
    "Batch": "rl_models.batch",
    "CausalLM": "rl_models.models",
    "CausalLMWithValue": "rl_models.models",
    "Critic": "rl_models.critic",
    "Grid": "rl_models.grid",
    "MegatronOptions": "rl_models.backends.options",
    "ModelConfig": "rl_models.config",
    "OptimizerOptions": "rl_models.optimizer",
    "PipelineOptions": "rl_models.backends.options",
    "Placement": "rl_models.cluster.placement",
    "RankDied": "rl_models.cluster.future",
    "RayModelGroup": "rl_models.cluster.group",
    "Resources": "rl_models.cluster.resources",
    "RouterLosses": "rl_models.backends.options",
    "TokenEstimates": "rl_models.actor_critic",
    "TokenLogProbs": "rl_models.actor",
    "ValueModel": "rl_models.models",
}


def __getattr__(name: str) -> Any:
    if name == "losses":
        return importlib.import_module("rl_models.losses")
    if name not in _HOME:
        raise AttributeError(f"module 'rl_models' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
