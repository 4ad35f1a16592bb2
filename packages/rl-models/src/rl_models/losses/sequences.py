"""The sequence that each token of a packed batch belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_ids(lengths: Sequence[int], mask: Tensor) -> Tensor:
    """Return the number of each token's sequence, `[T]` int64, on the device of `mask` `[T]`.

    Raises:
        ValueError: The lengths are negative or do not add up to T.
    """
    if sum(lengths) != len(mask) or min(lengths, default=0) < 0:
        raise ValueError(f"lengths {list(lengths)} must be non-negative and add up to the {len(mask)} tokens given")
    # Computed on the CPU, which knows the size of the result. Without sequences torch would infer float.
    return torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(mask.device)
