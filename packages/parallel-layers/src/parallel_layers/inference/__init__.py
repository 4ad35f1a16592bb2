"""Inference: paged caches of keys and values, and the draws of tokens."""

from parallel_layers.attention.cache import LayerCache, SequenceCache
from parallel_layers.inference.block_tables import OutOfBlocks
from parallel_layers.inference.cache import PagedKVCache
from parallel_layers.inference.decode_steps import DecodeSteps
from parallel_layers.inference.sampling import sample

__all__ = ["DecodeSteps", "LayerCache", "OutOfBlocks", "PagedKVCache", "SequenceCache", "sample"]
