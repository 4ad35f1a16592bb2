"""The images of a vision-language model, and the tensors of a vision tower that a model of text alone carries.

`rl_models.backends` implements the protocols, by transformers. T tokens of a packed batch, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import ckpt
from parallel_layers import PackedSequence
from parallel_models.model.decoder import VisualStates

# The images of each sequence, in the form of the implementation; None for a sequence without images. Empty: no images.
Visual = tuple[Any, ...]


class Images(Protocol):
    """The checks and positions of the images of sequences."""

    def require(self, sequences: Sequence[Tensor], visual: Visual) -> None:
        """Raise ValueError unless the model takes every image, and each image has its tokens in its sequence `[L]`."""
        ...

    def of_prompt(self, tokens: Tensor, visual: Any) -> tuple[Any, int]:
        """Return the images of a prompt `[L]` with the kinds of its tokens, and the positions it takes beyond L."""
        ...


class Vision(Images, Protocol):
    """A vision tower in front of the native layers."""

    @property
    def tower(self) -> nn.Module | None:
        """The tower's modules; None where this rank has no first pipeline stage."""
        ...

    def positioned(self, packed: PackedSequence, visual: Visual) -> PackedSequence:
        """Return the pack with the positions of its images."""
        ...

    def states(self, packed: PackedSequence, visual: Visual, *, separate_packs: bool = False) -> VisualStates | None:
        """Return the tower's output for a pack's images; `separate_packs`: the cp ranks have different packs."""
        ...


def carry(model: nn.Module, layout: ckpt.Layout, checkpoint: ckpt.Checkpoint, device: torch.device | str) -> None:
    """Add the carried tensors of a layout to the model of the first stage, as buffers with the dtypes of the files."""
    stored = checkpoint.tensors
    for name, shape in layout.carried.items():
        spelled = next(spelling for spelling in layout.family.file_names(name) if spelling in stored)
        *parents, leaf = name.split(".")
        owner = model
        for parent in parents:
            if parent not in owner._modules:
                owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.register_buffer(leaf, torch.empty(shape, dtype=stored[spelled][1].dtype, device=device))
