"""Rollout engines: they answer prompts with the policy's weights, behind one interface."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
