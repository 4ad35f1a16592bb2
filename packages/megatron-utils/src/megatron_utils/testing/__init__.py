"""Megatron-Core on a CPU, for tests and demonstrations: `cpu_stand_in`; and small models for them."""

from megatron_utils.testing.cpu import cpu_stand_in, stand_in_is_active
from megatron_utils.testing.models import MIXTURES, tiny_config

__all__ = ["MIXTURES", "cpu_stand_in", "stand_in_is_active", "tiny_config"]
