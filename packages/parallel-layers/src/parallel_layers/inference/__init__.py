"""Inference: caches of keys and values for prefill and decoding, and linears that overlap communication."""

from parallel_layers.inference.cache import SequenceCache
from parallel_layers.inference.contiguous import KVCache
from parallel_layers.inference.paged import PagedKVCache

__all__ = ["KVCache", "PagedKVCache", "SequenceCache"]
