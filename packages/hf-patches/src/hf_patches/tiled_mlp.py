"""Tiled MLPs: the tokens in tiles, each recomputed in the backward, so that one tile's activations live at a time.

An MLP works on every token alone, so tiling changes no result. For very long sequences its intermediate activations,
[T, intermediate], are the largest of a layer (arXiv:2506.13996, "sequence tiling").
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class TiledMLP:
    """Stands in for the `forward` of one MLP: [..., H] -> [..., H] in `tiles` parts of the tokens.

    Saved for the backward: the input alone. Gradients of the weights are the sum over the tiles. Inside another
    checkpoint (gradient checkpointing of the layer) it nests.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], tiles: int) -> None:
        self.untiled, self.tiles = forward, tiles

    def forward(self, hidden: Tensor) -> Tensor:
        """The MLP's output; tiles are as even as the count allows, and there are never more of them than tokens."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        parts = tokens.tensor_split(min(self.tiles, max(len(tokens), 1)))
        outputs = [checkpoint(self.untiled, part, use_reentrant=False) for part in parts]
        return torch.cat(outputs).view_as(hidden)


def find_mlps(backbone: nn.Module) -> list[nn.Module]:
    """The dense MLPs of a text backbone; an MLP of routed experts is none, its tokens are not alone."""
    return [
        module
        for module in backbone.modules()
        if type(module).__name__.endswith("MLP") and isinstance(getattr(module, "down_proj", None), nn.Module)
    ]
