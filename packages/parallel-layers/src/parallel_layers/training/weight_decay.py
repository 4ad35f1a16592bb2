"""`has_weight_decay`: which parameters decoupled weight decay applies to, by every optimizer and backend."""

from torch import Tensor


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies to a parameter: to matrices and stacks of matrices.

    Vectors (norm weights, biases, attention sinks) have none, nor have the biases of experts, which are stacked
    `[E, N]` under a name that ends in "bias".
    """
    return parameter.dim() > 1 and not name.endswith("bias")
