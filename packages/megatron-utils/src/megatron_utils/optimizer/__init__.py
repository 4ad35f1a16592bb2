"""Optimizer and learning-rate schedule: typed configs, and Megatron-Core's objects from them."""

from megatron_utils.optimizer.build import Optimizer, Step, gradient_buffers, wrap_data_parallel
from megatron_utils.optimizer.config import OptimizerConfig, ScheduleConfig
from megatron_utils.optimizer.states import ParameterStates

__all__ = [
    "Optimizer",
    "OptimizerConfig",
    "ParameterStates",
    "ScheduleConfig",
    "Step",
    "gradient_buffers",
    "wrap_data_parallel",
]
