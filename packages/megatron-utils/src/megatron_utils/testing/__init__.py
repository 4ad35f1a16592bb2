"""Megatron-Core on a CPU, for tests and demonstrations: `cpu_stand_in`."""

from megatron_utils.testing.cpu import cpu_stand_in, stand_in_is_active

__all__ = ["cpu_stand_in", "stand_in_is_active"]
