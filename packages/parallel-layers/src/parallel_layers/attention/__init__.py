"""Attention over packed sequences: `packed_attention` and its backends, and the layers `ParallelAttention` and
`ParallelLatentAttention`."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
