"""Which sequence each token of a packed batch belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_ids(lengths: Sequence[int], mask: Tensor) -> Tensor:
    """`[T]` int64, where `mask` `[T]` is: the number of each token's sequence.

    Raises:
        ValueError: the lengths are negative or do not add up to T.
    """
    if sum(lengths) != len(mask) or min(lengths, default=0) < 0:
        raise ValueError(f"lengths {list(lengths)} must be non-negative and add up to the {len(mask)} tokens given")
    # Made on the host, which knows how many there will be. The type is said: without sequences it would be float.
    return torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(mask.device)
