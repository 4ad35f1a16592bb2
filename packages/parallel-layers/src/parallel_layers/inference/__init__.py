"""Inference: paged caches of keys and values, and the draws of tokens."""

from parallel_layers.inference.block_tables import OutOfBlocks
from parallel_layers.inference.cache import PagedKVCache
from parallel_layers.inference.decode_steps import DecodeSteps
from parallel_layers.inference.sampling import sample
from parallel_layers.inference.sequence_cache import LayerCache, SequenceCache

__all__ = ["DecodeSteps", "LayerCache", "OutOfBlocks", "PagedKVCache", "SequenceCache", "sample"]
