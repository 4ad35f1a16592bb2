"""What a group of ranks holds together: every rank's places, and the type of every canonical tensor."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from ckpt.agreement import agree, all_gather_json
from ckpt.dtypes import DTYPES, dtype_name
from ckpt.layout import Layout
from ckpt.place import Place

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Chunk:
    """One model chunk in this process's hands.

    Attributes:
        place: where it stands.
        tensors: by local name; DTensors where data parallelism has divided them further.
        gathered: the whole tensors of DTensors, while they are moved.
    """

    place: Place
    tensors: Tensors
    gathered: dict[str, Tensor] = field(default_factory=dict)

    def whole(self, local: str) -> Tensor:
        """A tensor as the layout describes it; of a DTensor, between `Holdings.gather` and `Holdings.release`."""
        tensor = self.gathered.get(local, self.tensors[local])
        assert not isinstance(tensor, DTensor)
        return tensor


def _chunks(tensors: Tensors | Sequence[Tensors], place: Place | Sequence[Place] | None) -> list[Chunk]:
    places = [Place()] if place is None else [place] if isinstance(place, Place) else list(place)
    parts = [tensors] if isinstance(tensors, Mapping) else list(tensors)
    if len(places) != len(parts):
        raise ValueError(f"{len(parts)} sets of tensors for {len(places)} places; pass one for each chunk")
    return [
        Chunk(at, {name: tensor.detach() for name, tensor in part.items()})
        for at, part in zip(places, parts, strict=True)
    ]


def _check_chunk(chunk: Chunk, layout: Layout) -> None:
    blocks = layout.at(chunk.place)
    optional = {
        name for name, block in blocks.items() if all(layout.canonical[source].optional for source in block.names)
    }
    missing = [name for name in blocks if name not in chunk.tensors and name not in optional]
    unexpected = [name for name in chunk.tensors if name not in blocks]
    if missing or unexpected:
        raise ValueError(
            f"the tensors at {chunk.place} do not match the layout: missing {missing[:3]} ({len(missing)}), "
            f"unexpected {unexpected[:3]} ({len(unexpected)})"
        )
    for name, tensor in chunk.tensors.items():
        if tuple(tensor.shape) != blocks[name].shape:
            raise ValueError(
                f"{name} at {chunk.place} has shape {tuple(tensor.shape)}, the layout has {blocks[name].shape}"
            )


def _describe(chunks: list[Chunk], layout: Layout) -> dict[str, Any]:
    """What the other ranks need to know of this one: its places, and the type of every canonical tensor it has or
    lacks."""
    dtypes: dict[str, str | None] = {}
    for chunk in chunks:
        _check_chunk(chunk, layout)
        for name, block in layout.at(chunk.place).items():
            tensor = chunk.tensors.get(name)
            dtypes |= dict.fromkeys(block.names, None if tensor is None else dtype_name(tensor.dtype))
    return {"places": [chunk.place.to_json() for chunk in chunks], "dtypes": dtypes}


def _merge_dtypes(messages: list[dict[str, Any]], layout: Layout) -> dict[str, torch.dtype]:
    """The type of every canonical tensor that the ranks have, in the model's order."""
    seen: dict[str, tuple[int, str | None]] = {}
    for rank, message in enumerate(messages):
        for name, held in message["dtypes"].items():
            first_rank, first = seen.setdefault(name, (rank, held))
            if first != held:
                raise ValueError(
                    f"{name} is {first} on rank {first_rank} and {held} on rank {rank}; cast them to one type"
                )
    dtypes = {}
    for name, canonical in layout.canonical.items():
        held = seen.get(name, (0, None))[1]
        if held is not None:
            dtypes[name] = DTYPES[held]
        elif not canonical.optional:
            raise ValueError(f"no rank of the group holds {name}; pass a group that spans the whole grid")
    return dtypes


@dataclass(frozen=True)
class Holdings:
    """The ranks' tensors, as every rank knows them.

    Attributes:
        layout: what the tensors are pieces of.
        chunks: this rank's own.
        places: for each rank, the places of its chunks.
        dtypes: canonical name -> type, for all that is held, in the model's order.
        rank: this rank.
    """

    layout: Layout
    chunks: list[Chunk]
    places: list[list[Place]]
    dtypes: dict[str, torch.dtype]
    rank: int

    @cached_property
    def _divided(self) -> dict[str, list[tuple[Chunk, str]]]:
        """Canonical name -> the DTensors of this rank that hold pieces of it, by chunk and local name."""
        found: dict[str, list[tuple[Chunk, str]]] = {}
        for chunk in self.chunks:
            for local, tensor in chunk.tensors.items():
                for name in self.layout.at(chunk.place)[local].names if isinstance(tensor, DTensor) else ():
                    found.setdefault(name, []).append((chunk, local))
        return found

    def gather(self, name: str) -> None:
        """Make this rank's tensors that hold pieces of a canonical one whole; a mesh's ranks do so in one order."""
        for chunk, local in self._divided.get(name, ()):
            tensor = chunk.tensors[local]
            if local not in chunk.gathered and isinstance(tensor, DTensor):
                chunk.gathered[local] = tensor.full_tensor()

    def release(self, done: AbstractSet[str]) -> None:
        """Drop what `gather` has made, where all its canonical tensors are done."""
        for chunk in self.chunks:
            blocks = self.layout.at(chunk.place)
            for local in [local for local in chunk.gathered if done >= set(blocks[local].names)]:
                del chunk.gathered[local]

    def stored_dtypes(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """The types after a cast to `dtype`: floating-point tensors only, and none that keeps its own."""
        if dtype is None:
            return self.dtypes
        return {
            name: dtype if own.is_floating_point and not self.layout.canonical[name].keep_dtype else own
            for name, own in self.dtypes.items()
        }


def take_stock(
    tensors: Tensors | Sequence[Tensors],
    layout: Layout,
    place: Place | Sequence[Place] | None,
    group: ProcessGroup | None,
) -> Holdings:
    """Check this rank's tensors against the layout and learn what the other ranks hold.

    Communication: small JSON all-gathers.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape or type than on other ranks; on every rank.
    """
    chunks = agree(lambda: _chunks(tensors, place), group)
    messages = all_gather_json(agree(lambda: _describe(chunks, layout), group), group)
    places = [[Place(**entry) for entry in message["places"]] for message in messages]
    dtypes = agree(lambda: _merge_dtypes(messages, layout), group)
    return Holdings(layout, chunks, places, dtypes, 0 if group is None else group.rank())
