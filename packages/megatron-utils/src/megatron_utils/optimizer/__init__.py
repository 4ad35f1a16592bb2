"""Optimizer: a typed config, and Megatron-Core's objects from it."""

from megatron_utils.optimizer.build import Optimizer, Step, gradient_buffers, wrap_data_parallel
from megatron_utils.optimizer.config import OptimizerConfig
from megatron_utils.optimizer.states import ParameterStates

__all__ = [
    "Optimizer",
    "OptimizerConfig",
    "ParameterStates",
    "Step",
    "gradient_buffers",
    "wrap_data_parallel",
]
