"""How the parameters of a transformers model follow from the tensors of its checkpoint, for training checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ckpt
from ckpt import Block, Canonical, Role


class HubLayout(ckpt.Layout):
    """A transformers model that is whole on its rank; FSDP2 may divide it further.

    A parameter is the checkpoint's tensor of its name, or, of a mixture of experts in a family that ckpt knows, the
    stack of the checkpoint's experts. Where ckpt does not know the family, the names are transformers' own.

    Args:
        config: the Hugging Face configuration.
        role: "causal_lm" or "value".
        shapes: of the model's parameters, by name.
    """

    def __init__(self, config: Mapping[str, Any], role: Role, shapes: Mapping[str, tuple[int, ...]]) -> None:
        try:
            known = ckpt.layout_for(dict(config), target="parallel", role=role)
            canonical, stacked = known.canonical, known.at(ckpt.Place())
        except ValueError:
            canonical, stacked = {}, {}
        blocks: dict[str, Block] = {}
        for name, shape in shapes.items():
            block = stacked.get(name)
            fits = block is not None and block.shape == shape
            blocks[name] = block if block is not None and fits else Block.whole(name, shape)
        held = {piece: name for name, block in blocks.items() for piece in block.names}
        own = {name: canonical.get(name) or Canonical(shapes[held[name]]) for name in held}
        for name, value in (("config", dict(config)), ("canonical", own), ("blocks", blocks)):
            object.__setattr__(self, name, value)

    def at(self, place: ckpt.Place) -> dict[str, Block]:
        """The parameters; every rank has all of them."""
        blocks: dict[str, Block] = object.__getattribute__(self, "blocks")
        return blocks
