"""Context parallelism: split a pack's tokens over a group, and attend by Ulysses or ring attention."""

from parallel_layers.attention.context_parallel.ring import ring_attention
from parallel_layers.attention.context_parallel.sequence_layout import Layout, gather_sequence, split_sequence
from parallel_layers.attention.context_parallel.ulysses import exchange_heads, ulysses_attention

__all__ = ["Layout", "exchange_heads", "gather_sequence", "ring_attention", "split_sequence", "ulysses_attention"]
