"""Attention over packed sequences: `packed_attention` and its backends, and the layer `ParallelAttention`."""

from parallel_layers.attention.backends import available_backends
from parallel_layers.attention.layer import ParallelAttention
from parallel_layers.attention.packed import packed_attention

__all__ = ["ParallelAttention", "available_backends", "packed_attention"]
