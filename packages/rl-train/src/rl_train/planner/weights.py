"""The weights that a rank holds, by their names in the layout, and their division by FSDP2."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ckpt
from parallel_models.optimizers import is_hidden_matrix


class Weight(NamedTuple):
    """A local tensor of a rank.

    Attributes:
        numel: The number of elements.
        wide: Whether the tensor stays fp32 in a model of any dtype, as ERNIE 4.5's routers do.
        matrix: The elements of the largest of the layers' weight matrices that it consists of; 0: it has others.
    """

    numel: int
    wide: bool
    matrix: int


def local_weights(layout: ckpt.Layout, chunks: Sequence[ckpt.Place]) -> dict[str, Weight]:
    """Return every local tensor of a rank's chunks; a shared tensor counts once."""
    weights = {}
    for name, block in ((name, block) for chunk in chunks for name, block in layout.at(chunk).items()):
        sources = {source: layout.canonical[source] for source in block.names}
        if sources[block.names[0]].copy_of is None:
            hidden = all(is_hidden_matrix(source, canonical.shape) for source, canonical in sources.items())
            matrix = max(math.prod(canonical.shape[-2:]) for canonical in sources.values()) if hidden else 0
            wide = all(canonical.keep_dtype for canonical in sources.values())
            weights[name] = Weight(math.prod(block.shape), wide, matrix)
    return weights


def divided_over(sizes: Mapping[str, int], data: int, copies: int) -> int:
    """Return a rank's share of sizes where `data` ranks divide the dense layers, and `copies` ranks the experts."""
    experts = sum(size for name, size in sizes.items() if ".experts." in name) if copies != data else 0
    return -(-(sum(sizes.values()) - experts) // data) + -(-experts // copies)
