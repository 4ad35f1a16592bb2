"""Rows of numbers of sequences that lie one after another."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_ids(lengths: Sequence[int], mask: Tensor) -> Tensor:
    """Return the number of each token's sequence, `[T]` int64, on the device of `mask` `[T]`."""
    if sum(lengths) != len(mask) or min(lengths, default=0) < 0:
        raise ValueError(f"lengths {list(lengths)} must be non-negative and add up to the {len(mask)} tokens given")
    # Computed on the CPU, which knows the size of the result. Without sequences torch would infer float.
    return torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(mask.device)


def are_integers(row: Tensor) -> bool:
    """Return whether a tensor is one row of integers; an empty list becomes a row of floats."""
    return row.dim() == 1 and not (len(row) and (row.is_floating_point() or row.dtype == torch.bool))


def cat_rows(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Concatenate rows; without a row the result has the given dtype and device."""
    return torch.cat(list(tensors)) if tensors else torch.zeros(0, dtype=dtype, device=device)
