"""Sharded actors and critics for reinforcement learning on language models, from a Hugging Face checkpoint and back."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel_layers.model import ModelConfig
    from rl_models import losses
    from rl_models.batch import Batch
    from rl_models.engines.optimizer import OptimizerOptions
    from rl_models.engines.options import MegatronOptions, PipelineOptions, RouterLosses
    from rl_models.grid import Grid
    from rl_models.models.language_models import CausalLM, CausalLMWithValue, ValueModel
    from rl_models.workers.actor import Actor, TokenLogProbs
    from rl_models.workers.actor_critic import ActorCritic, TokenEstimates
    from rl_models.workers.critic import Critic

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
    "RouterLosses",
    "TokenEstimates",
    "TokenLogProbs",
    "ValueModel",
    "losses",
]

# Where each name lives. Imported when it is first asked for: an engine alone does not wait for all of them.
_HOME = {
    "Actor": "rl_models.workers.actor",
    "ActorCritic": "rl_models.workers.actor_critic",
    "Batch": "rl_models.batch",
    "CausalLM": "rl_models.models.language_models",
    "CausalLMWithValue": "rl_models.models.language_models",
    "Critic": "rl_models.workers.critic",
    "Grid": "rl_models.grid",
    "MegatronOptions": "rl_models.engines.options",
    "ModelConfig": "parallel_layers.model",
    "OptimizerOptions": "rl_models.engines.optimizer",
    "PipelineOptions": "rl_models.engines.options",
    "RouterLosses": "rl_models.engines.options",
    "TokenEstimates": "rl_models.workers.actor_critic",
    "TokenLogProbs": "rl_models.workers.actor",
    "ValueModel": "rl_models.models.language_models",
}


def __getattr__(name: str) -> Any:
    if name == "losses":
        return importlib.import_module("rl_models.losses")
    if name not in _HOME:
        raise AttributeError(f"module 'rl_models' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
