"""`backend="megatron"`: Megatron-Core's GPTModel, schedules and optimizer, through megatron-utils.

Megatron-Core keeps its process groups in global state. Each call here enters that state for this engine's grid and
leaves it again, so actors and critics on different grids live in one process; inside a `megatron_grid` of the caller's
own nothing here can be called. It computes on GPUs; on a CPU only inside `megatron_utils.testing.cpu_stand_in`, which
tests and demonstrations enter themselves.
"""

from rl_models.engines.megatron.load import load

__all__ = ["load"]
