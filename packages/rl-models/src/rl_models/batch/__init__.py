"""Batches of packed sequences with fields per token, and the images of sequences."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
