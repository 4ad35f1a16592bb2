"""Inference: caches of keys and values, for which prefill and decoding are one code path."""

from parallel_layers.inference.cache import SequenceCache
from parallel_layers.inference.contiguous import KVCache
from parallel_layers.inference.paged import PagedKVCache

__all__ = ["KVCache", "PagedKVCache", "SequenceCache"]
