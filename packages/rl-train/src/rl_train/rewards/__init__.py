"""Rewards: functions of prompts and responses, called in processes of their own."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
