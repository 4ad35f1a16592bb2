"""Count the bytes that each place of a grid holds, from a configuration alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ckpt.files.dtypes import dtype_of_name
from ckpt.layout.model_layout import Layout
from ckpt.layout.place import Grid, Place
from ckpt.transfer.sources import Source

# The first pattern that matches a canonical name decides the tensor's component.
_COMPONENTS = (
    ("embedding", r"embed_tokens"),
    ("head", r"^lm_head|^score"),
    ("vision", r"visual\."),
    ("norms", r"norm"),
    ("attention", r"self_attn\."),
    ("router", r"\.gate\."),
    ("experts", r"\.experts\."),
    ("mlp", r"mlp\."),
)


@dataclass(frozen=True)
class PlaceBytes:
    """The bytes of each component at one place, padding and replicas included."""

    place: Place
    components: dict[str, int]

    @property
    def total(self) -> int:
        """All bytes of the place."""
        return sum(self.components.values())


def stored_dtypes(source: Source) -> dict[str, torch.dtype]:
    """Return the stored dtype of each canonical tensor of a checkpoint."""
    return {name: source.tensors[parts[0][0]][1].dtype for name, parts in source.pieces.items()}


def config_dtype(config: Mapping[str, object]) -> torch.dtype:
    """Return the dtype that a configuration names; float32 without a name.

    Raises:
        ValueError: torch has no dtype of this name.
    """
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = dtype_of_name(str(name))
    if dtype is None:
        raise ValueError(f"the config's dtype={name!r} is not a type of torch")
    return dtype


def plan_bytes(
    layout: Layout, grid: Grid, dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
) -> list[PlaceBytes]:
    """Return the bytes of every place of a grid.

    Args:
        layout: The model.
        grid: The grid.
        dtype: The dtype of tensors that `dtypes` does not name.
        dtypes: Canonical name -> dtype.

    Raises:
        ValueError: The model does not fit the grid.
    """
    known = dtypes or {}
    result = []
    for place in grid.places():
        components = {label: 0 for label, _ in _COMPONENTS}
        for block in layout.at(place).values():
            if layout.is_optional(block):
                continue
            name = block.names[0]
            label = next((label for label, pattern in _COMPONENTS if re.search(pattern, name)), "other")
            components[label] = components.get(label, 0) + block.numel * known.get(name, dtype).itemsize
        result.append(PlaceBytes(place, components))
    return result
