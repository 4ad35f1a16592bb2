"""Rotary position embedding: the table of rope types, the cos and sin of positions, and the rotation."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
