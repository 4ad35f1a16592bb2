"""Attention over packed sequences: `packed_attention` and its backends, and the layers `ParallelAttention` and
`ParallelLatentAttention`."""

from parallel_layers.attention.backends import available_backends
from parallel_layers.attention.cache import CacheShape
from parallel_layers.attention.config import AttentionConfig, LatentConfig
from parallel_layers.attention.latent import ParallelLatentAttention
from parallel_layers.attention.layer import ParallelAttention
from parallel_layers.attention.packed import packed_attention
from parallel_layers.attention.shared_keys import SharedKeys, repeated_rows

__all__ = [
    "AttentionConfig",
    "CacheShape",
    "LatentConfig",
    "ParallelAttention",
    "ParallelLatentAttention",
    "SharedKeys",
    "available_backends",
    "packed_attention",
    "repeated_rows",
]
