"""Sharded actors and critics for reinforcement learning on language models, from a Hugging Face checkpoint and back."""

from parallel_layers.lora import LoraOptions
from parallel_layers.model import ModelConfig
from rl_models import losses
from rl_models.batch import Batch
from rl_models.engines.optimizers.interface import OptimizerOptions
from rl_models.engines.options import MegatronOptions, PipelineOptions, RouterLosses
from rl_models.grid import Grid
from rl_models.models.language_models import CausalLM, CausalLMWithValue, ValueModel
from rl_models.visual import VisualInputs
from rl_models.workers.actor import Actor, TokenLogProbs
from rl_models.workers.actor_critic import ActorCritic
from rl_models.workers.critic import Critic

__all__ = [
    "Actor",
    "ActorCritic",
    "Batch",
    "CausalLM",
    "CausalLMWithValue",
    "Critic",
    "Grid",
    "LoraOptions",
    "MegatronOptions",
    "ModelConfig",
    "OptimizerOptions",
    "PipelineOptions",
    "RouterLosses",
    "TokenLogProbs",
    "ValueModel",
    "VisualInputs",
    "losses",
]
