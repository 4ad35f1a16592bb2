"""`Shards`: the parameters of one rank, in the terms of ckpt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

import ckpt


@dataclass(frozen=True)
class Shards:
    """The parameters of this rank, and the parts of the checkpoint's tensors that they hold.

    Attributes:
        layout: The layout of the model.
        chunks: The place of each pipeline chunk of the rank, and its parameters by the layout's local names, which
            differ between chunks. Parameters sharded by FSDP2 are DTensors.
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
