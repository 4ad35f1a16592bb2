"""Environments: tasks that give both the prompts of a run and their reward, and conversations of several turns."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
