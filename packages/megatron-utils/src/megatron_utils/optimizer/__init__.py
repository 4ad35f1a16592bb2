"""Optimizer: a typed config, and Megatron-Core's objects from it."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
