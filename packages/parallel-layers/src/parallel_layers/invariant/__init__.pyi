from parallel_layers.attention.backends import INVARIANT_BACKENDS as INVARIANT_BACKENDS
from parallel_layers.invariant.view import linear_log_probs as linear_log_probs, tp_invariant as tp_invariant
from parallel_layers.linear.invariant import BLOCKS as BLOCKS, linear as linear
