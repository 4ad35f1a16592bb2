"""`HubLayout`: the layout of a transformers model, for checkpoints and streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ckpt
from ckpt import Block, Canonical, Role
from ckpt.layout import Family


class HubLayout(ckpt.Layout):
    """The layout of a transformers model that is whole on its rank; FSDP2 may divide it further.

    Its local names are transformers' names. ckpt's table of the family adds facts about the tensors in files, such as
    which of them is a copy of another.

    Args:
        config: The config, as transformers writes it.
        role: The role of the model.
        class_prefix: The model's class without "ForCausalLM", "ForTokenClassification", ...
        blocks: The model's tensors as blocks of the files' tensors.
    """

    def __init__(self, config: Mapping[str, Any], role: Role, class_prefix: str, blocks: Mapping[str, Block]) -> None:
        try:
            canonical = ckpt.layout_for(dict(config), target="parallel", role=role).canonical
        except ValueError:
            canonical = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for piece in (piece for block in blocks.values() for piece in block.pieces):
            ends = tuple(stop for _, stop in piece.canonical_range or ())
            shapes[piece.name] = tuple(map(max, ends, shapes.get(piece.name, ends)))
        held = {name: Canonical(shape) for name, shape in shapes.items()}
        held |= {name: known for name, known in canonical.items() if shapes.get(name) == known.shape}
        family = Family(str(config.get("model_type")), class_prefix, (), {})
        values = {
            "config": dict(config),
            "role": role,
            "family": family,
            "canonical": held,
            "blocks": dict(blocks),
            "kept": {},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def at(self, place: ckpt.Place) -> dict[str, Block]:
        """Return the tensors, which every rank has."""
        blocks: dict[str, Block] = object.__getattribute__(self, "blocks")
        return blocks
