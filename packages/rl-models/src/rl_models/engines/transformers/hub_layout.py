"""`HubLayout`: the layout of a transformers model, for training checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ckpt
from ckpt import Block, Canonical, Piece, Role
from ckpt.layout.pieces import extents, full_box


class HubLayout(ckpt.Layout):
    """The layout of a transformers model that is whole on its rank; FSDP2 may divide it further.

    A parameter is the checkpoint's tensor of its name, or a stack of the checkpoint's experts. The order of a stack is
    that of ckpt's table of the family, or else that of transformers, `hub.stacked_experts`. `shapes` are those of the
    model's parameters and stored buffers, by name.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        role: Role,
        shapes: Mapping[str, tuple[int, ...]],
        stacks: Mapping[str, Sequence[str]],
    ) -> None:
        try:
            known = ckpt.layout_for(dict(config), target="parallel", role=role)
            canonical, stacked = known.canonical, known.at(ckpt.Place())
        except ValueError:
            canonical, stacked = {}, {}
        blocks: dict[str, Block] = {}
        for name, shape in shapes.items():
            block = stacked.get(name)
            fits = block is not None and block.shape == shape
            blocks[name] = block if block is not None and fits else _block(name, shape, stacks)
        pieces = [(piece.name, piece.canonical_range) for block in blocks.values() for piece in block.pieces]
        own = {name: canonical.get(name) or Canonical(extents(box)) for name, box in pieces if box is not None}
        for name, value in {"config": dict(config), "canonical": own, "blocks": blocks, "kept": {}}.items():
            object.__setattr__(self, name, value)

    def at(self, place: ckpt.Place) -> dict[str, Block]:
        """Return the parameters, which every rank has."""
        blocks: dict[str, Block] = object.__getattribute__(self, "blocks")
        return blocks


def _block(name: str, shape: tuple[int, ...], stacks: Mapping[str, Sequence[str]]) -> Block:
    """Return the block of the checkpoint's tensor of this name, or of the stack of the experts' matrices."""
    ending = next((ending for ending in stacks if name.endswith(f".{ending}")), None)
    if ending is None:
        return Block.whole(name, shape)
    sources = [name.removesuffix(ending) + source for source in stacks[ending]]
    experts, rows, columns = shape
    matrix = full_box((rows // len(sources), columns))
    pieces = [
        Piece(source.replace("*", str(e)), matrix, ((e, e + 1), (start, start + matrix[0][1]), matrix[1]))
        for e in range(experts)
        for source, start in zip(sources, range(0, rows, matrix[0][1]), strict=True)
    ]
    return Block(shape, tuple(pieces))
