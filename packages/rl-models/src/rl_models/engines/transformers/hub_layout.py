"""`HubLayout`: the layout of a transformers model, for checkpoints and streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ckpt
from ckpt import Block, Canonical, Piece, Role
from ckpt.layout.families.table import Family
from ckpt.layout.pieces import full_box


class HubLayout(ckpt.Layout):
    """The layout of a transformers model that is whole on its rank; FSDP2 may divide it further.

    A tensor is a block of ckpt's table of the family, or else of the files that the model was loaded from.

    Args:
        config: The config, as transformers writes it.
        role: The role of the model.
        class_prefix: The model's class without "ForCausalLM", "ForTokenClassification", ...
        blocks: The model's tensors as blocks of the files' tensors.
    """

    def __init__(self, config: Mapping[str, Any], role: Role, class_prefix: str, blocks: Mapping[str, Block]) -> None:
        try:
            layout = ckpt.layout_for(dict(config), target="parallel", role=role)
            canonical, stacked = layout.canonical, layout.at(ckpt.Place())
        except ValueError:
            canonical, stacked = {}, {}
        chosen = {
            name: stacked[name] if name in stacked and stacked[name].shape == block.shape else block
            for name, block in blocks.items()
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for piece in (piece for block in chosen.values() for piece in block.pieces):
            ends = tuple(stop for _, stop in piece.canonical_range or ())
            shapes[piece.name] = tuple(map(max, ends, shapes.get(piece.name, ends)))
        own = {name: Canonical(shape) for name, shape in shapes.items()}
        own |= {name: known for name, known in canonical.items() if shapes.get(name) == known.shape}
        family = Family(str(config.get("model_type")), class_prefix, (), {})
        values = {
            "config": dict(config),
            "role": role,
            "family": family,
            "canonical": own,
            "blocks": chosen,
            "kept": {},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def at(self, place: ckpt.Place) -> dict[str, Block]:
        """Return the tensors, which every rank has."""
        blocks: dict[str, Block] = object.__getattribute__(self, "blocks")
        return blocks


def named_block(name: str, shape: tuple[int, ...], stacks: Mapping[str, Sequence[str]]) -> Block:
    """Return the block of the checkpoint's tensor of this name, or of the stack of the experts' matrices.

    `stacks` are those of `hub.stacked_experts`.
    """
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
