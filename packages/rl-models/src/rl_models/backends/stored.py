"""What a checkpoint says of itself before it is loaded."""

from __future__ import annotations

from collections import Counter

import torch

import ckpt


def stored_dtype(path: str) -> torch.dtype:
    """The type of most of a checkpoint's tensors."""
    stored = Counter(info.dtype for _, info in ckpt.open_checkpoint(path).tensors.values())
    ((name, _),) = stored.most_common(1)
    return name
