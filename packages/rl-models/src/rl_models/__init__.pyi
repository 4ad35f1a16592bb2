from parallel_layers.model import LoraOptions as LoraOptions
from parallel_layers.model.config import ModelConfig as ModelConfig
from parallel_models.engine.grid import Grid as Grid
from parallel_models.engine.options import PipelineOptions as PipelineOptions, RouterLosses as RouterLosses
from parallel_models.model.language_models import (
    CausalLM as CausalLM,
    CausalLMWithValue as CausalLMWithValue,
    ValueModel as ValueModel,
)
from parallel_models.optimizers.interface import OptimizerOptions as OptimizerOptions
from rl_models.api.actor import Actor as Actor, TokenLogProbs as TokenLogProbs
from rl_models.api.actor_critic import ActorCritic as ActorCritic
from rl_models.api.critic import Critic as Critic
from rl_models.api.model_calls import Policy as Policy
from rl_models.backends.options import MegatronOptions as MegatronOptions
from rl_models.batch.batch import Batch as Batch
from rl_models.batch.visual import VisualInputs as VisualInputs
from rl_models.losses.inputs import LossInputs as LossInputs
