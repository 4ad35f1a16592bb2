"""The names that ckpt gives the tensors of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ckpt import layout_for


def canonical(tensors: Mapping[str, Tensor], checkpoint: Path) -> dict[str, Tensor]:
    """Return tensors under canonical names; transformers saves those of some families (Kimi-K2.5) under others.

    It also saves OLMo Hybrid's convolutions of q, k and v in thirds of their channels.
    """
    layout = layout_for(checkpoint)
    names = {alias: name for name, entry in layout.canonical.items() for alias in entry.aliases}
    named = {name if name in layout.canonical else names.get(name, name): x for name, x in tensors.items()}
    for first in [name for name in named if name.endswith("q_conv1d.weight")]:
        parts = [first.replace("q_conv1d", f"{kind}_conv1d") for kind in "qkv"]
        joined = torch.cat([named[part] for part in parts])
        rows = joined.split([layout.canonical[part].shape[0] for part in parts])
        named |= {part: x.clone() for part, x in zip(parts, rows, strict=True)}
    return named
