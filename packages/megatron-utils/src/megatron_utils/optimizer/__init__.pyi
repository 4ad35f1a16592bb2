from megatron_utils.optimizer.build import (
    Optimizer as Optimizer,
    Step as Step,
    gradient_buffers as gradient_buffers,
    wrap_data_parallel as wrap_data_parallel,
)
from megatron_utils.optimizer.config import OptimizerConfig as OptimizerConfig
from megatron_utils.optimizer.states import ParameterStates as ParameterStates
