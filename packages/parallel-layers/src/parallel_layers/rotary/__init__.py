"""Rotary position embedding: the table of rope types, the cos and sin of positions, and the rotation."""

from parallel_layers.rotary.embedding import RotaryEmbedding
from parallel_layers.rotary.rope_types import ROPE_TYPES, RopeParameters, RopeType, require_length, yarn_softmax_scale
from parallel_layers.rotary.rotation import apply_rotary, rotate_queries_and_keys, split_and_rotate

__all__ = [
    "ROPE_TYPES",
    "RopeParameters",
    "RopeType",
    "RotaryEmbedding",
    "apply_rotary",
    "require_length",
    "rotate_queries_and_keys",
    "split_and_rotate",
    "yarn_softmax_scale",
]
