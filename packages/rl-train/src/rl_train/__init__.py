"""Reinforcement learning of language models from prompts and a reward: loop, Ray groups, planner, command line."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
