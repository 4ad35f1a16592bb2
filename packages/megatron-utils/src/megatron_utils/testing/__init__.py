"""Megatron-Core on a CPU, for tests and demonstrations: `cpu_stand_in`."""

from megatron_utils.testing.cpu import cpu_stand_in

__all__ = ["cpu_stand_in"]
