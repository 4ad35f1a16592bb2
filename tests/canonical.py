"""The names that ckpt gives the tensors of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ckpt import layout_for


def canonical(tensors: Mapping[str, Tensor], checkpoint: Path) -> dict[str, Tensor]:
    """Return tensors under canonical names; transformers saves those of some families (Kimi-K2.5) under others."""
    layout = layout_for(checkpoint)
    names = {alias: name for name, entry in layout.canonical.items() for alias in entry.aliases}
    return {name if name in layout.canonical else names.get(name, name): x for name, x in tensors.items()}
