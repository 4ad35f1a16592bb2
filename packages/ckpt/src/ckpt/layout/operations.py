"""`multiply_adds`: the work of one token in the weights of a model."""

import itertools
import math
from fractions import Fraction

from ckpt.layout.model_layout import Layout


def multiply_adds(layout: Layout) -> int:
    """Return the multiply-adds of one token in the matrices and convolutions of a model's layers and heads.

    A token goes through its chosen experts alone, and looks its embeddings up. Multi-token-prediction layers and a
    vision tower are left out.
    """
    total = Fraction(0)
    front = layout._walk((), first=True, last=False)
    rest = layout._walk(range(layout.num_layers), first=False, last=True)
    for sized, layer, _ in itertools.chain(front, rest):
        share = layout.active_share if sized.of_experts else 1
        for (name, *_), shape in sized.canonical(layer):
            is_lookup = sized.row.where in ("first", "chunk") and "embed" in name
            if len(shape) > 1 and not (is_lookup or name.endswith(("bias", "A_log"))):
                total += share * math.prod(shape)
    return int(total)
