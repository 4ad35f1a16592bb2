"""Tiled MLPs: compute an MLP in tiles of tokens, and compute each tile again in the backward.

An MLP computes every token independently, so tiling changes no result. In very long sequences the intermediate
activations `[T, intermediate]` are the largest of a layer (arXiv:2506.13996, "sequence tiling"); with tiles only one
tile's activations exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from parallel_layers.memory.recompute import checkpoint


class TiledMLP:
    """Replaces the `forward` of one MLP: `[..., H]` to `[..., H]` in `tiles` parts of the tokens.

    The backward needs the input only. Gradients of the weights are summed over the tiles. Tiles may lie inside another
    checkpoint (gradient checkpointing of the layer). Under sequence parallelism every tile communicates, and all ranks
    have the same number of tokens.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], tiles: int) -> None:
        self.untiled, self.tiles = forward, tiles

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output of the MLP, in tiles as even as the count allows, at most one per token."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        tiles = tokens.tensor_split(min(self.tiles, max(len(tokens), 1)))
        outputs = [checkpoint(self.untiled, tile) for tile in tiles]
        return torch.cat(outputs).view_as(hidden)


def tile_call(mlp: nn.Module, tiles: int) -> Callable[[Tensor], Tensor]:
    """Return the `forward` of an MLP in `tiles` tiles of tokens."""
    return TiledMLP(mlp.forward, tiles).forward
