"""Learn which pieces each rank of a group holds, and the dtype of every canonical tensor."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.dtypes import DTYPES, check_cast, dtype_name, refuse_overflow
from ckpt.layout.model_layout import Layout
from ckpt.layout.overlaps import on_this_rank
from ckpt.layout.pieces import Block, Box
from ckpt.layout.place import Place
from ckpt.transfer.agreement import agree, all_gather_json

Tensors = Mapping[str, Tensor]
Held = dict[str, tuple[Tensor, Box]]


@dataclass(frozen=True)
class Chunk:
    """One model chunk that a rank holds.

    Attributes:
        place: The chunk's place.
        blocks: Local name -> the rank's part of the tensor: the whole, or a part under data parallelism.
        tensors: Local name -> tensor; empty for the chunks of other ranks.
    """

    place: Place
    blocks: Mapping[str, Block]
    tensors: Tensors


@dataclass(frozen=True)
class Holdings:
    """The ranks' tensors, as every rank knows them.

    Attributes:
        layout: The layout of the tensors.
        ranks: The chunks of each rank.
        dtypes: Canonical name -> dtype, for all tensors that ranks hold, in the model's order.
        rank: This rank.
        key: A digest of the places, names, dtypes and boxes of all ranks.
    """

    layout: Layout
    ranks: list[list[Chunk]]
    dtypes: dict[str, torch.dtype]
    rank: int
    key: str

    @property
    def chunks(self) -> list[Chunk]:
        """This rank's chunks."""
        return self.ranks[self.rank]

    def stored_dtypes(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """Return the dtypes after a cast to `dtype` of all floating-point tensors, except those with `keep_dtype`.

        Raises:
            ValueError: `dtype` is a dtype of integers, or a value of this rank's tensors is too large for `dtype`.
        """
        check_cast(dtype)
        if dtype is None:
            return self.dtypes
        cast = {
            name: dtype
            for name, own in self.dtypes.items()
            if own.is_floating_point and not self.layout.canonical[name].keep_dtype
        }
        for chunk in self.chunks:
            for local, tensor in chunk.tensors.items():
                if cast.keys() & chunk.blocks[local].names:
                    refuse_overflow(f"{local} at {chunk.place}", tensor, dtype)
        return {**self.dtypes, **cast}


def take_stock(
    tensors: Tensors | Sequence[Tensors],
    layout: Layout,
    place: Place | Sequence[Place] | None,
    group: ProcessGroup | None,
) -> Holdings:
    """Check this rank's tensors against the layout and learn what the other ranks hold.

    The layout keeps the result: while the ranks hold the same pieces, they exchange digests only.

    Communication: small JSON all-gathers.

    Raises:
        ValueError: Tensors are missing or unexpected, or shapes or dtypes differ between ranks; on every rank.
    """
    rank = 0 if group is None else group.rank()
    own = agree(lambda: _own_chunks(tensors, place, layout), group)
    described = [_describe(at, held) for at, held in own]
    kept: Holdings | None = layout.kept.get("holdings")
    facts = all_gather_json([_digest(described), kept.key if kept is not None and kept.rank == rank else None], group)
    key = _digest([digest for digest, _ in facts])
    if kept is None or any(known != key for _, known in facts):
        messages = all_gather_json(described, group)

        def merge() -> Holdings:
            ranks = [[_chunk(entry, layout) for entry in message] for message in messages]
            return Holdings(layout, ranks, _merge_dtypes(messages, ranks, layout), rank, key)

        kept = layout.kept["holdings"] = agree(merge, group)
    ranks = [*kept.ranks]
    ranks[rank] = [
        dataclasses.replace(chunk, tensors={name: tensor for name, (tensor, _) in held.items()})
        for chunk, (_, held) in zip(ranks[rank], own, strict=True)
    ]
    return dataclasses.replace(kept, ranks=ranks)


def _digest(message: object) -> str:
    return hashlib.sha256(json.dumps(message).encode()).hexdigest()


def _own_chunks(
    tensors: Tensors | Sequence[Tensors], place: Place | Sequence[Place] | None, layout: Layout
) -> list[tuple[Place, Held]]:
    places = [Place()] if place is None else [place] if isinstance(place, Place) else list(place)
    sets = [tensors] if isinstance(tensors, Mapping) else list(tensors)
    if len(places) != len(sets):
        raise ValueError(f"{len(sets)} sets of tensors for {len(places)} places; pass one for each chunk")
    return [(at, _held(at, chunk, layout)) for at, chunk in zip(places, sets, strict=True)]


def _held(place: Place, tensors: Tensors, layout: Layout) -> Held:
    blocks = layout.at(place)
    missing = [name for name in blocks if name not in tensors and not layout.is_optional(blocks[name])]
    unexpected = [name for name in tensors if name not in blocks]
    if missing or unexpected:
        raise ValueError(
            f"the tensors at {place} do not match the layout: missing {missing[:3]} ({len(missing)}), "
            f"unexpected {unexpected[:3]} ({len(unexpected)})"
        )
    for tensor in tensors.values():
        dtype_name(tensor.dtype)
    return {
        name: on_this_rank(f"{name} at {place}", tensors[name], block.shape)
        for name, block in blocks.items()
        if name in tensors
    }


def _describe(place: Place, held: Held) -> dict[str, Any]:
    """Describe a chunk to the other ranks: its place, and each tensor's dtype and box."""
    return {
        "place": place.to_json(),
        "tensors": {name: (dtype_name(tensor.dtype), box) for name, (tensor, box) in held.items()},
    }


def _chunk(message: Mapping[str, Any], layout: Layout) -> Chunk:
    place = Place(**message["place"])
    whole = layout.at(place)
    parts = {
        name: whole[name].part(tuple((start, stop) for start, stop in box))
        for name, (_, box) in message["tensors"].items()
    }
    return Chunk(place, parts, {})


def _merge_dtypes(
    messages: list[list[dict[str, Any]]], ranks: list[list[Chunk]], layout: Layout
) -> dict[str, torch.dtype]:
    """Return the dtype of every canonical tensor that a rank holds, in the model's order."""
    seen: dict[str, tuple[int, str | None]] = {}
    for rank, (message, chunks) in enumerate(zip(messages, ranks, strict=True)):
        for entry, chunk in zip(message, chunks, strict=True):
            for local, block in layout.at(chunk.place).items():
                held = entry["tensors"].get(local, (None,))[0]
                for name in block.names:
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
