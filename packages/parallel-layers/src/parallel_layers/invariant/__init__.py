"""Trainable forwards with the same bits at every tensor-parallel size and in every batch."""

from functools import partial

from parallel_layers import head
from parallel_layers.attention.backends import INVARIANT_BACKENDS
from parallel_layers.invariant.view import tp_invariant
from parallel_layers.linear.invariant import BLOCKS, linear

linear_log_probs = partial(head.linear_log_probs, blocks=BLOCKS)

__all__ = ["BLOCKS", "INVARIANT_BACKENDS", "linear", "linear_log_probs", "tp_invariant"]
