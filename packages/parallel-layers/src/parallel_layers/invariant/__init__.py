"""Trainable forwards with the same bits at every tensor-parallel size and in every batch."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
