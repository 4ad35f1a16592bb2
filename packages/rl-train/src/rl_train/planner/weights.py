"""The weights that a rank holds, by their names in the layout, and their division by FSDP2."""

import math
from collections.abc import Mapping, Sequence

import ckpt


def held_weights(layout: ckpt.Layout, chunks: Sequence[ckpt.Place]) -> dict[str, int]:
    """Return the number of elements of every local tensor of a rank's chunks; a shared tensor counts once."""
    return {
        name: math.prod(block.shape)
        for chunk in chunks
        for name, block in layout.at(chunk).items()
        if layout.canonical[block.names[0]].copy_of is None
    }


def learning(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the weights that learn; multi-token-prediction layers are frozen."""
    return {name: numel for name, numel in sizes.items() if not name.startswith("mtp.")}


def divided_over(sizes: Mapping[str, int], data: int, copies: int) -> int:
    """Return a rank's elements where `data` ranks divide the dense layers, and `copies` ranks the experts."""
    experts = sum(numel for name, numel in sizes.items() if ".experts." in name) if copies != data else 0
    return -(-(sum(sizes.values()) - experts) // data) + -(-experts // copies)
