"""The layout of a whole transformers model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ckpt.layout.families.table import Family, Role
from ckpt.layout.model_layout import Layout, layout_for
from ckpt.layout.pieces import Block, Canonical, exchanged, other_order
from ckpt.layout.place import Place


class HubLayout(Layout):
    """The layout of a whole transformers model, whose tensors may be DTensors over tp and FSDP2.

    Its local names are transformers' names. ckpt's table of the family adds facts about the tensors in files, such as
    the tensors that are copies of others.

    Args:
        config: The config, as transformers writes it.
        role: The role of the model.
        class_prefix: The model's class without "ForCausalLM", "ForTokenClassification", ...
        blocks: The model's tensors as blocks of the files' tensors.

    Attributes:
        in_other_order: The local names of the matrices that ckpt's table has with the last two dimensions exchanged.
    """

    blocks: Mapping[str, Block]
    in_other_order: Collection[str]

    def __init__(self, config: Mapping[str, Any], role: Role, class_prefix: str, blocks: Mapping[str, Block]) -> None:
        labels = next((blocks[name].shape[0] for name in blocks if name == "score.weight"), 1)
        try:
            canonical = layout_for(dict(config), target="parallel", role=role, num_labels=labels).canonical
        except ValueError:
            canonical = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for piece in (piece for block in blocks.values() for piece in block.pieces):
            ends = tuple(stop for _, stop in piece.canonical_range or ())
            shapes[piece.name] = tuple(map(max, ends, shapes.get(piece.name, ends)))
        tensors = {name: Canonical(shape) for name, shape in shapes.items()}
        tensors |= {name: tensor for name, tensor in canonical.items() if shapes.get(name) == tensor.shape}
        exchanges = bool(other_order(canonical, shapes))
        exchanged_names = {name for name, tensor in canonical.items() if tensor.transposable and exchanges}
        family = Family(str(config.get("model_type")), class_prefix, (), {})
        values = {
            "config": dict(config),
            "role": role,
            "family": family,
            "canonical": tensors,
            "blocks": dict(blocks),
            "in_other_order": [name for name, block in blocks.items() if exchanged_names.intersection(block.names)],
            "num_labels": labels,
            "kept": {},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def at(self, place: Place) -> dict[str, Block]:
        """Return the tensors, which every rank has."""
        return dict(self.blocks)

    def exchanged(self, names: Collection[str]) -> HubLayout:
        """Return the layout with the last two dimensions of some local tensors, and of the files', exchanged."""
        blocks = {name: Block.whole(self.blocks[name].names[0], exchanged(self.blocks[name].shape)) for name in names}
        return HubLayout(self.config, self.role, self.family.class_prefix, {**self.blocks, **blocks})
