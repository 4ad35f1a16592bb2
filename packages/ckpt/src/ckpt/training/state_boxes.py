"""Describe a training run's weights and optimizer state as boxes of canonical tensors, to save and to load.

Weights are `model/NAME`, moments `optimizer/SLOT/NAME`. A slot of one element (a step count) is saved with each
canonical tensor that its parameter joins, so that any other fusion can load it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ckpt.files.boxio import BoxOf, view_of
from ckpt.layout.model_layout import Layout
from ckpt.layout.overlaps import on_this_rank, require_memory
from ckpt.layout.pieces import Block, extents
from ckpt.layout.place import Place
from ckpt.training.dcp_storage import stored_tensors
from ckpt.transfer.redistribute import OptimizerState

# A rank's place, or one place for each of its pipeline chunks; None: the whole model.
Places = Place | Sequence[Place] | None


def held_boxes(tensors: Mapping[str, Tensor], optimizer: OptimizerState, layout: Layout, place: Places) -> list[BoxOf]:
    """Return the boxes that this rank saves, as views of its tensors (of the local parts of DTensors).

    Raises:
        ValueError: A tensor is missing, unknown or of another shape; names the tensor.
    """
    blocks = _blocks(layout, place)
    unknown = [name for name in (*tensors, *optimizer) if name not in blocks]
    missing = [name for name, block in blocks.items() if name not in tensors and not layout.is_optional(block)]
    if unknown or missing:
        raise ValueError(
            f"the tensors at {place or Place()} do not match the layout: missing {missing[:3]}, unknown {unknown[:3]}"
        )
    boxes: list[BoxOf] = []
    parts: dict[str, Block] = {}
    for name, tensor in tensors.items():
        local, box = on_this_rank(name, tensor, blocks[name].shape)
        parts[name] = blocks[name].part(box)
        boxes += _boxes("model", local, parts[name], layout)
    for name, slots in optimizer.items():
        for slot, tensor in slots.items():
            shape = tuple(tensor.shape)
            local, box = on_this_rank(f"{name}'s {slot}", tensor, shape)
            # An optimizer may hold a moment as a DTensor, or the local part alone.
            part = blocks[name].part(box) if shape == blocks[name].shape else parts.get(name, blocks[name])
            boxes += _slot_boxes(slot, local, name, part, layout)
    return boxes


def all_places(place: Places) -> Sequence[Place]:
    """Return a rank's places as a sequence."""
    return [Place()] if place is None else [place] if isinstance(place, Place) else place


def _blocks(layout: Layout, place: Places) -> dict[str, Block]:
    """Return the local tensors of all of a rank's chunks."""
    places = all_places(place)
    blocks: dict[str, Block] = {}
    for at in places:
        if both := sorted(blocks.keys() & layout.at(at).keys()):
            raise ValueError(f"several chunks of {list(map(str, places))} have {both[:3]}; save each chunk by itself")
        blocks |= layout.at(at)
    return blocks


def _boxes(kind: str, tensor: Tensor, block: Block, layout: Layout) -> list[BoxOf]:
    """Return the boxes of a block's pieces, as views of its tensor."""
    return [
        BoxOf(
            f"{kind}/{piece.name}",
            layout.canonical[piece.name].shape,
            piece.canonical_range,
            view_of(tensor, piece.local_range).view(extents(piece.canonical_range)),
        )
        for piece in block.pieces
        if piece.canonical_range is not None
    ]


def _slot_boxes(slot: str, tensor: Tensor, name: str, block: Block, layout: Layout) -> list[BoxOf]:
    if tuple(tensor.shape) == block.shape:
        return _boxes(f"optimizer/{slot}", tensor, block, layout)
    if tensor.numel() != 1 or "/" in slot:
        raise ValueError(
            f"{name}'s {slot} has shape {tuple(tensor.shape)}; it must be the parameter's {block.shape} or one element"
        )
    return [BoxOf(f"optimizer/{slot}/{source}", (), (), tensor.view(())) for source in block.names]


@dataclass
class WantedState:
    """The tensors that a place loads, and the boxes of canonical tensors that fill them.

    Attributes:
        tensors: Local name -> weights.
        optimizer: Local name -> slot -> moments; `settle_counts` adds the counts.
        counts: (local name, slot) -> the one-element state of each canonical tensor that the parameter joins.
        boxes: Views of all these tensors.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    counts: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    boxes: list[BoxOf] = field(default_factory=list)

    def settle_counts(self) -> None:
        """Move the count of every parameter to `optimizer`.

        Raises:
            ValueError: The canonical tensors that a parameter joins have different counts.
        """
        for (name, slot), values in self.counts.items():
            if not torch.equal(values, values[:1].expand_as(values)):
                raise ValueError(f"the {slot} of the tensors fused in {name} differ: {values.tolist()}")
            self.optimizer.setdefault(name, {})[slot] = values[0].clone()


def wanted_state(
    folder: Path, layout: Layout, place: Places, into: Mapping[str, Tensor] | None, device: torch.device
) -> WantedState:
    """Return the state that a place loads from a training checkpoint: new tensors, or those of `into`.

    Raises:
        ValueError: The checkpoint is of another model, or `into` does not fit; names the tensor.
    """
    require_memory("device", device)
    stored = stored_tensors(folder)
    slots = sorted({name.split("/")[1] for name in stored if name.startswith("optimizer/")})
    wanted = WantedState()
    for name, block in _blocks(layout, place).items():
        if layout.is_optional(block) and not any(f"model/{source}" in stored for source in block.names):
            continue
        wanted.tensors[name], part = _weight(name, block, stored, into, device)
        wanted.boxes += _boxes("model", wanted.tensors[name], part, layout)
        for slot in slots:
            keys = [f"optimizer/{slot}/{source}" for source in block.names]
            if not all(key in stored for key in keys):
                continue
            dtype, shape = stored[keys[0]]
            if shape == layout.canonical[block.names[0]].shape:
                moment = torch.zeros(part.shape, dtype=dtype, device=device)
                wanted.optimizer.setdefault(name, {})[slot] = moment
                wanted.boxes += _boxes(f"optimizer/{slot}", moment, part, layout)
            else:
                values = torch.zeros(len(keys), dtype=dtype)
                wanted.counts[name, slot] = values
                wanted.boxes += [BoxOf(key, (), (), value) for key, value in zip(keys, values, strict=True)]
    return wanted


def _weight(
    name: str,
    block: Block,
    stored: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    into: Mapping[str, Tensor] | None,
    device: torch.device,
) -> tuple[Tensor, Block]:
    absent = [source for source in block.names if f"model/{source}" not in stored]
    if absent:
        raise ValueError(f"the training checkpoint is of another model: it lacks {absent[:3]}")
    if into is None:
        return torch.zeros(block.shape, dtype=stored[f"model/{block.names[0]}"][0], device=device), block
    if name not in into:
        raise ValueError(f"into[{name!r}] is missing; the layout has {block.shape}")
    tensor, box = on_this_rank(f"into[{name!r}]", into[name], block.shape)
    part = block.part(box)
    for piece in part.pieces:
        if piece.is_padding:
            view_of(tensor, piece.local_range).zero_()
    return tensor, part
