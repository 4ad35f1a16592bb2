"""`Shards`: what a rank holds of a model, in the terms of ckpt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

import ckpt


@dataclass(frozen=True)
class Shards:
    """The parameters of this rank, and which parts of the checkpoint's tensors they are.

    Attributes:
        layout: of the model.
        chunks: for each pipeline chunk that the rank holds, its place and its parameters by the layout's local names;
            no two chunks of a rank use one name.
            Where FSDP2 has divided a place's parameters further, they are DTensors.
    """

    layout: ckpt.Layout
    chunks: Sequence[tuple[ckpt.Place, Mapping[str, Tensor]]]

    @property
    def places(self) -> list[ckpt.Place]:
        """The places of all chunks."""
        return [place for place, _ in self.chunks]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters of all chunks, by local name."""
        return {name: parameter for _, part in self.chunks for name, parameter in part.items()}
