"""Rewards: functions of prompts and responses, called in separate processes."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
