"""Trainable forwards with the same bits at every tensor-parallel size and in every batch."""

from parallel_layers.invariant.attention import INVARIANT_BACKENDS
from parallel_layers.invariant.blocks import BLOCKS
from parallel_layers.invariant.head import linear_log_probs
from parallel_layers.invariant.view import tp_invariant
from parallel_layers.linear.invariant import linear

__all__ = ["BLOCKS", "INVARIANT_BACKENDS", "linear", "linear_log_probs", "tp_invariant"]
