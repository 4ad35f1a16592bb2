from parallel_models.engine.adapters import Adapters as Adapters
from parallel_models.engine.checkpoint import model_config as model_config
from parallel_models.engine.engine import (
    Engine as Engine,
    MicroBatch as MicroBatch,
    Outputs as Outputs,
    Role as Role,
    Shards as Shards,
)
from parallel_models.engine.grid import Grid as Grid
from parallel_models.engine.options import (
    EngineKeywords as EngineKeywords,
    EngineOptions as EngineOptions,
    PipelineOptions as PipelineOptions,
    RouterLosses as RouterLosses,
)
from parallel_models.generation.decoding import CacheOptions as CacheOptions, Decoding as Decoding
from parallel_models.generation.draw import generate as generate
from parallel_models.generation.options import (
    GenerationKeywords as GenerationKeywords,
    GenerationOptions as GenerationOptions,
    SamplingOptions as SamplingOptions,
)
from parallel_models.model.language_models import (
    CausalLM as CausalLM,
    CausalLMWithValue as CausalLMWithValue,
    ValueModel as ValueModel,
)
from parallel_models.optimizers.interface import OptimizerOptions as OptimizerOptions
from parallel_models.training.loading import be_deterministic as be_deterministic, load_engine as load_engine
