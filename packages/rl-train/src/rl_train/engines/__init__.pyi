from parallel_models.generation.options import SamplingOptions as SamplingOptions
from rl_train.engines.adapters_in_vllm import in_vllm_names as in_vllm_names
from rl_train.engines.engine_on_ranks import EngineOnRanks as EngineOnRanks
from rl_train.engines.engine_on_ray import EngineOnRay as EngineOnRay
from rl_train.engines.engine_pool import EnginePool as EnginePool
from rl_train.engines.in_flight import InFlightPool as InFlightPool
from rl_train.engines.interface import (
    LocalEngine as LocalEngine,
    Request as Request,
    RolloutEngine as RolloutEngine,
)
from rl_train.engines.native import Native as Native, NativeEngine as NativeEngine
from rl_train.engines.process import processes as processes
from rl_train.engines.separate import SeparateEngine as SeparateEngine
from rl_train.engines.vllm import Vllm as Vllm
from rl_train.engines.vllm_engine import VllmEngine as VllmEngine
