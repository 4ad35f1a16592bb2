"""Megatron-Core without its global state: models, optimizer, schedules, checkpoints, router replay."""

# An unsupported version of Megatron-Core is refused before anything imports it.
from megatron_utils.core_version import INSTALLED as INSTALLED
from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
