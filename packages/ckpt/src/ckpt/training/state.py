"""Describe a training run's weights and optimizer state as parts of canonical tensors, to save and to load.

Weights are `model/NAME`, moments `optimizer/SLOT/NAME`. A slot of one element (a step count) is saved with each
canonical tensor that its parameter joins, so that any other fusion can load it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ckpt.layout.dtensors import on_this_rank, require_mapping, require_memory
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Block, extents, full_box
from ckpt.layout.place import Place
from ckpt.training.boxes import require_whole
from ckpt.transfer.holdings import LocalParts, Parts, Places, Tensors, check_names, places_of, prefixed
from ckpt.transfer.tensor_files import TensorFiles

# Local name -> slot -> tensor.
OptimizerState = Mapping[str, Mapping[str, Tensor]]


def local_state(tensors: Tensors, optimizer: OptimizerState, layout: Layout, place: Places) -> LocalParts:
    """Return the parts that this rank holds of each of its places; of DTensors, their local parts.

    Raises:
        ValueError: A tensor is missing, unexpected or of another shape; names the tensor.
    """
    for argument, value in (("tensors", tensors), ("optimizer", optimizer)):
        require_mapping(argument, value)
    blocks = _blocks(layout, place)
    check_names([*dict.fromkeys((*tensors, *optimizer))], blocks, layout, str(place or Place()))
    state: list[tuple[Place, Parts]] = []
    for at in places_of(place):
        parts: Parts = {}
        for name, block in layout.at(at).items():
            box = full_box(block.shape)
            if name in tensors:
                _, box = parts[f"model/{name}"] = on_this_rank(name, tensors[name], block.shape)
            slots = optimizer.get(name, {})
            if not isinstance(slots, Mapping) or not all(isinstance(tensor, Tensor) for tensor in slots.values()):
                raise ValueError(f"optimizer[{name!r}] must map slots to tensors, such as {{'exp_avg': tensor}}")
            for slot, tensor in slots.items():
                shape = tuple(tensor.shape)
                values, held = on_this_rank(f"{name}'s {slot}", tensor, shape)
                # An optimizer may hold a moment as a DTensor, or the local part alone.
                held = held if shape == block.shape else box
                if shape and tuple(values.shape) == extents(held):
                    parts[f"optimizer/{slot}/{name}"] = values, held
                elif values.numel() == 1 and "/" not in slot:
                    parts |= {f"optimizer/{slot}/{source}": (values.view(()), ()) for source in block.names}
                else:
                    raise ValueError(
                        f"{name}'s {slot} has shape {shape}; it must be the parameter's {block.shape} or one element"
                    )
        state.append((at, parts))
    return state


def _blocks(layout: Layout, place: Places) -> dict[str, Block]:
    """Return the local tensors of all of a rank's chunks."""
    places = places_of(place)
    blocks: dict[str, Block] = {}
    for at in places:
        if repeated := sorted(blocks.keys() & layout.at(at).keys()):
            raise ValueError(
                f"several chunks of {list(map(str, places))} have {repeated[:3]}; save each chunk by itself"
            )
        blocks |= layout.at(at)
    return blocks


@dataclass
class WantedState:
    """The tensors that a place loads, and the pieces that fill them.

    Attributes:
        tensors: Local name -> weights.
        optimizer: Local name -> slot -> moments; `settle_counts` adds the counts.
        counts: (local name, slot) -> the one-element state of each canonical tensor that the parameter joins.
        blocks: Each of these tensors, or this rank's part of it, and its block.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    counts: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    blocks: list[tuple[Tensor, Block]] = field(default_factory=list)

    def settle_counts(self) -> None:
        """Move the count of every parameter to `optimizer`; refuse counts that differ in a fused parameter."""
        for (name, slot), values in self.counts.items():
            if not torch.equal(values, values[:1].expand_as(values)):
                raise ValueError(f"the {slot} of the tensors fused in {name} differ: {values.tolist()}")
            self.optimizer.setdefault(name, {})[slot] = values[0].clone()


def wanted_state(
    stored: TensorFiles, layout: Layout, place: Places, into: Tensors | None, device: torch.device, folder: Path
) -> WantedState:
    """Return the state that a place loads from a training checkpoint: new tensors, or the tensors of `into`.

    `folder` is the name of the checkpoint in errors.

    Raises:
        ValueError: The checkpoint is damaged or of another model, or `into` does not fit; names the tensor.
    """
    require_memory("device", device)
    slots = sorted({name.split("/")[1] for name in stored.pieces if name.startswith("optimizer/")})
    wanted = WantedState()
    for name, block in _blocks(layout, place).items():
        if layout.is_optional(block) and not any(f"model/{source}" in stored.pieces for source in block.names):
            continue
        absent = [source for source in block.names if f"model/{source}" not in stored.pieces]
        if absent:
            raise ValueError(f"{folder} is of another model: it lacks {absent[:3]}; load that model")
        if into is None:
            dtype = stored.stored_dtype(f"model/{block.names[0]}")
            tensor, local_block = torch.zeros(block.shape, dtype=dtype, device=device), block
        elif name in into:
            tensor, box = on_this_rank(f"into[{name!r}]", into[name], block.shape)
            local_block = block.part(box)
        else:
            raise ValueError(f"into[{name!r}] is missing; the layout has {block.shape}")
        wanted.tensors[name] = tensor
        wanted.blocks.append((tensor, prefixed(local_block, "model/")))
        for slot in slots:
            keys = [f"optimizer/{slot}/{source}" for source in block.names]
            present = [key for key in keys if key in stored.pieces]
            if not present:
                continue
            dtype = stored.stored_dtype(present[0])
            if stored.pieces[present[0]][0][1].local_range:
                moment = torch.zeros(local_block.shape, dtype=dtype, device=device)
                wanted.optimizer.setdefault(name, {})[slot] = moment
                wanted.blocks.append((moment, prefixed(local_block, f"optimizer/{slot}/")))
            else:
                values = torch.zeros(len(keys), dtype=dtype)
                wanted.counts[name, slot] = values
                wanted.blocks += [(value, Block.whole(key, ())) for key, value in zip(keys, values, strict=True)]
    require_whole(
        stored,
        {
            name: layout.canonical[name.rpartition("/")[2]].shape if block.shape else ()
            for _, block in wanted.blocks
            for name in block.names
        },
        folder,
    )
    return wanted
