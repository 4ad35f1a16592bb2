"""Protocols of the images of a vision-language model; `rl_models.backends` has them, by transformers.

T tokens of a packed batch, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from parallel_layers import PackedSequence
from parallel_models.model.decoder import VisualStates

# The images of each sequence, in the form of the implementation; None for a sequence without images. Empty: no images.
Visual = tuple[Any, ...]


class Images(Protocol):
    """The checks and positions of the images of sequences."""

    def require(self, sequences: Sequence[Tensor], visual: Visual) -> None:
        """Raise ValueError unless the model takes every image, and each image has its tokens among those `[L]`."""
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

    def states(self, packed: PackedSequence, visual: Visual, *, apart: bool = False) -> VisualStates | None:
        """Return the tower's output for a pack's images; `apart`: context-parallel ranks have different packs."""
        ...
