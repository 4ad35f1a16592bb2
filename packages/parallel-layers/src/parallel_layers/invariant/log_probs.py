"""`linear_log_probs` with sums in blocks of fixed size: the same bits at every tensor-parallel size."""

from functools import partial

from parallel_layers.head import log_probs
from parallel_layers.linear.invariant import BLOCKS

linear_log_probs = partial(log_probs.linear_log_probs, blocks=BLOCKS)
