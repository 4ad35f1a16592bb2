"""Inference: paged caches of keys and values, and the draws of tokens."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
