"""`backend="megatron"`: Megatron-Core's GPTModel, schedules and optimizer, through megatron-utils.

Megatron-Core keeps its process groups in global state. Each call enters that state for this engine's grid and leaves it
again, so actors and critics on different grids share a process; a call inside another `megatron_grid` raises.
Megatron-Core computes on GPUs; on a CPU, tests enter `megatron_utils.testing.cpu_stand_in`.
"""
