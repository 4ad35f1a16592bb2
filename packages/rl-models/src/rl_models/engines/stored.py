"""The dtype of a checkpoint."""

from __future__ import annotations

from collections import Counter

import torch

import ckpt
from rl_models.engines.options import COMPUTED


def stored_dtype(path: str) -> torch.dtype:
    """Return the dtype of most of a checkpoint's tensors.

    Raises:
        ValueError: No model computes in this dtype.
    """
    stored = Counter(info.dtype for _, info in ckpt.open_checkpoint(path).tensors.values())
    ((dtype, _),) = stored.most_common(1)
    if dtype not in COMPUTED:
        raise ValueError(f"{path} is stored in {dtype}, in which no model computes; load it with dtype=torch.bfloat16")
    return dtype
