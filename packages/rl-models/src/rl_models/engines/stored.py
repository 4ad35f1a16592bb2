"""What a checkpoint says of itself before it is loaded."""

from __future__ import annotations

from collections import Counter

import torch

import ckpt
from rl_models.engines.options import COMPUTED


def stored_dtype(path: str) -> torch.dtype:
    """The type of most of a checkpoint's tensors.

    Raises:
        ValueError: no model computes in it.
    """
    stored = Counter(info.dtype for _, info in ckpt.open_checkpoint(path).tensors.values())
    ((dtype, _),) = stored.most_common(1)
    if dtype not in COMPUTED:
        raise ValueError(f"{path} is stored in {dtype}, in which no model computes; load it with dtype=torch.bfloat16")
    return dtype
