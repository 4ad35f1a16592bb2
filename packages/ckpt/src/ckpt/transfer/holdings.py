"""Learn which pieces each rank of a group holds, and give each piece an owner among the ranks that hold it."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.boxio import view_of
from ckpt.files.dtypes import DTYPES, check_cast, dtype_name, refuse_overflow
from ckpt.layout.adapters import Change
from ckpt.layout.dtensors import on_this_rank, require_mapping
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Block, Box, Copy, Piece, Shape, carried_over, cover_problem, extents, volume
from ckpt.layout.place import Place
from ckpt.transfer.agreement import agree, all_gather_json, rank_in

Tensors = Mapping[str, Tensor]
# Local name -> (this rank's part of the tensor, the part's box in the tensor).
Parts = dict[str, tuple[Tensor, Box]]
LocalParts = Sequence[tuple[Place, Parts]]
# One place, or one for each chunk of a rank; None: the whole model.
Places = Place | Sequence[Place] | None


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


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """A piece that a rank holds: the rank in the group, its chunk, the local tensor and the piece."""

    rank: int
    chunk: int
    local: str
    piece: Piece


# Canonical tensors, their common box, and the box of a local tensor that stacks these boxes.
_Stack = tuple[list[str], Box, Box]


@dataclass(frozen=True)
class Holdings:
    """The ranks' tensors, as every rank knows them.

    Attributes:
        ranks: The chunks of each rank.
        shapes: Canonical name -> full shape, for all tensors that ranks hold; the model's in its order.
        dtypes: Canonical name -> dtype, of the same tensors.
        rank: This rank.
        key: A digest of the places, names, dtypes and boxes of all ranks.
        change: Applied to the values of every box that leaves this rank; None: unchanged.
        stacks: The stacks of the boxes that `copy_box` has copied, for the next time.
    """

    ranks: list[list[Chunk]]
    shapes: dict[str, Shape]
    dtypes: dict[str, torch.dtype]
    rank: int
    key: str
    change: Change | None = None
    stacks: dict[object, list[_Stack]] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def chunks(self) -> list[Chunk]:
        """This rank's chunks."""
        return self.ranks[self.rank]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, replicas counted once."""
        return sum(math.prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    def pieces(self) -> Iterator[HeldPiece]:
        """Yield the pieces of all ranks, without padding."""
        for rank, chunks in enumerate(self.ranks):
            for index, chunk in enumerate(chunks):
                for local, block in chunk.blocks.items():
                    yield from (HeldPiece(rank, index, local, piece) for piece in block.pieces if not piece.is_padding)

    def with_tensors(self, parts_of_chunks: LocalParts) -> "Holdings":
        """Return these holdings with this rank's tensors."""
        ranks = [*self.ranks]
        ranks[self.rank] = [
            dataclasses.replace(chunk, tensors={name: tensor for name, (tensor, _) in parts.items()})
            for chunk, (_, parts) in zip(self.chunks, parts_of_chunks, strict=True)
        ]
        return dataclasses.replace(self, ranks=ranks)

    def values(self, held: HeldPiece, box: Box) -> Tensor:
        """Return a box of a local tensor of this rank, as a view, or changed."""
        values, there = view_of(self.chunks[held.chunk].tensors[held.local], box), held.piece.canonical_range
        if self.change is None or there is None:
            return values
        return self.change([held.piece.name], carried_over(box, Copy(held.piece.local_range, there)), values[None])[0]

    def copy_box(self, chunk: int, local: str, box: Box, into: Tensor) -> None:
        """Write a box of a local tensor of this rank, changed or not, into a tensor of the box's extents.

        The box may hold several pieces. Neighbouring experts are changed at once.
        """
        values = view_of(self.chunks[chunk].tensors[local], box)
        into = into.view(values.shape)
        if self.change is None:
            into.copy_(values)
            return
        if (key := (self.rank, chunk, local, box)) not in self.stacks:
            self.stacks[key] = list(_stacks(self.chunks[chunk].blocks[local].part(box)))
        for names, there, here in self.stacks[key]:
            stack = view_of(values, here)
            changed = self.change(names, there, stack.view(len(names), *extents(there)))
            view_of(into, here).copy_(changed.view(stack.shape))

    def stored_dtypes(self, dtype: torch.dtype | None, layout: Layout) -> dict[str, torch.dtype]:
        """Return the dtypes after a cast to `dtype` of all floating-point tensors, except those with `keep_dtype`.

        Raises:
            ValueError: `dtype` is a dtype of integers, or a value of this rank's tensors is too large for `dtype`.
        """
        check_cast(dtype)
        if dtype is None:
            return self.dtypes
        cast = {
            name: dtype
            for name, held_dtype in self.dtypes.items()
            if held_dtype.is_floating_point and not layout.canonical[name].keep_dtype
        }
        for chunk in self.chunks:
            for local, tensor in chunk.tensors.items():
                if cast.keys() & chunk.blocks[local].names:
                    refuse_overflow(f"{local} at {chunk.place}", tensor, dtype)
        return {**self.dtypes, **cast}

    def assign_owners(self) -> dict[str, list[HeldPiece]]:
        """Choose an owner for every box of every canonical tensor: the holder with the fewest elements so far.

        Returns:
            Canonical name -> the pieces that together hold each of its elements once; the same on every rank.

        Raises:
            ValueError: The ranks together lack a part of a tensor, or divide its copies in two ways.
        """
        holders: dict[str, dict[Box, list[HeldPiece]]] = {name: {} for name in self.shapes}
        for held in self.pieces():
            holders[held.piece.name].setdefault(held.piece.canonical_range or (), []).append(held)
        load = [0] * len(self.ranks)
        owners: dict[str, list[HeldPiece]] = {}
        for name, boxes in holders.items():
            problem = cover_problem(sorted(boxes), self.shapes[name])
            if problem:
                listed = ", ".join(str(chunk.place) for chunks in self.ranks for chunk in chunks)
                raise ValueError(
                    f"the ranks do not hold all of {name} once: {problem}; their places are {listed}. Pass a group "
                    "that spans the whole grid, each rank with its own place, and divide all copies of a tensor alike"
                )
            owners[name] = []
            for box, candidates in boxes.items():
                owner = min(candidates, key=lambda held: (load[held.rank], held.rank))
                load[owner.rank] += volume(box)
                owners[name].append(owner)
        return owners


def _stacks(block: Block) -> Iterator[_Stack]:
    """Yield the pieces of a block; pieces of neighbouring experts, each at an index of the block, are one stack."""
    runs: list[list[Piece]] = []
    last: dict[tuple[Box | None, Box], list[Piece]] = {}
    for piece in sorted(block.pieces, key=lambda piece: piece.local_range):
        box, here = piece.canonical_range, piece.local_range
        has_index = box is not None and len(here) > len(box)
        run = last.get((box, here[has_index:]), [])
        if not has_index or not run or run[-1].local_range[0][1] != here[0][0]:
            runs.append(run := [])
            last[box, here[has_index:]] = run
        run.append(piece)
    for run in runs:
        (first, *_), end = run, run[-1].local_range
        if first.canonical_range is not None:
            here = ((first.local_range[0][0], end[0][1]), *end[1:]) if end else ()
            yield [piece.name for piece in run], first.canonical_range, here


def prefixed(block: Block, prefix: str) -> Block:
    """Return the block of the canonical tensors whose names have a further prefix."""
    if not prefix:
        return block
    pieces = (dataclasses.replace(piece, name=prefix + piece.name) for piece in block.pieces)
    return dataclasses.replace(block, pieces=tuple(pieces))


def places_of(place: Places) -> list[Place]:
    """Return a rank's places as a list."""
    return [Place()] if place is None else [place] if isinstance(place, Place) else list(place)


def take_stock(
    tensors: Tensors | Sequence[Tensors], layout: Layout, place: Places, group: ProcessGroup | None
) -> Holdings:
    """Check this rank's tensors against the layout and learn what the other ranks hold.

    The layout keeps the result: while the ranks hold the same pieces, they exchange digests only.

    Communication: small JSON all-gathers.

    Raises:
        ValueError: Tensors are missing or unexpected, or shapes or dtypes differ between ranks; on every rank.
    """

    def describe() -> tuple[LocalParts, str]:
        parts = _local_parts(tensors, places_of(place), layout)
        return parts, _digest(_describe(parts))

    parts, digest = agree(describe, group)
    kept: Holdings | None = layout.kept.get("holdings")
    known = kept.key if kept is not None and kept.rank == rank_in(group) else None
    facts = all_gather_json([digest, known], group)
    key = _digest([digest for digest, _ in facts])
    if kept is None or any(known != key for _, known in facts):
        kept = layout.kept["holdings"] = dataclasses.replace(gather_holdings(parts, layout, group), key=key)
    return kept.with_tensors(parts)


def gather_holdings(parts: LocalParts, layout: Layout, group: ProcessGroup | None, prefix: str = "") -> Holdings:
    """Return what all ranks hold, without the tensors.

    A name in `own` may have a prefix that ends in a slash; the names of its canonical tensors get the same prefix. A
    name that is no local tensor's is the name of a canonical tensor of one element. The ranks must hold all of the
    model's weights, under `prefix`.

    Raises:
        ValueError: Dtypes differ between ranks, or no rank holds one of the weights; on every rank.
    """
    messages = all_gather_json(agree(lambda: _describe(parts), group), group)
    return agree(lambda: _merged(messages, layout, prefix, rank_in(group)), group)


def _merged(messages: Sequence[list[dict[str, Any]]], layout: Layout, prefix: str, rank: int) -> Holdings:
    """Return what all ranks hold, by the descriptions of their chunks; see `gather_holdings`."""
    ranks = [[_chunk(entry, layout) for entry in message] for message in messages]
    seen: dict[str, tuple[int, str, Shape]] = {}
    for number, (message, chunks) in enumerate(zip(messages, ranks, strict=True)):
        for entry, chunk in zip(message, chunks, strict=True):
            for local, block in chunk.blocks.items():
                dtype = entry["tensors"][local][0]
                for name in block.names:
                    shape = layout.canonical[name.rpartition("/")[2]].shape if block.shape else ()
                    first_rank, first, _ = seen.setdefault(name, (number, dtype, shape))
                    if first != dtype:
                        raise ValueError(
                            f"{name} is {first} on rank {first_rank} and {dtype} on rank {number}; cast to one type"
                        )
    weights = {prefix + name: canonical for name, canonical in layout.canonical.items()}
    absent = [name for name, canonical in weights.items() if name not in seen and not canonical.optional]
    if absent:
        raise ValueError(f"no rank of the group holds {absent[:3]}; pass a group that spans the whole grid")
    names = [name for name in dict.fromkeys((*weights, *seen)) if name in seen]
    dtypes = {name: DTYPES[seen[name][1]] for name in names}
    return Holdings(ranks, {name: seen[name][2] for name in names}, dtypes, rank, "")


def _digest(message: object) -> str:
    return hashlib.sha256(json.dumps(message).encode()).hexdigest()


def _local_parts(tensors: Tensors | Sequence[Tensors], places: Sequence[Place], layout: Layout) -> LocalParts:
    sets = list(tensors) if isinstance(tensors, Sequence) else [tensors]
    if len(places) != len(sets):
        raise ValueError(f"{len(sets)} sets of tensors for {len(places)} places; pass one for each chunk")
    parts: list[tuple[Place, Parts]] = []
    for at, held in zip(places, sets, strict=True):
        require_mapping("tensors", held)
        blocks = layout.at(at)
        check_names(held, blocks, layout, str(at))
        shapes = {name: block.shape for name, block in blocks.items() if name in held}
        parts.append((at, {name: on_this_rank(f"{name} at {at}", held[name], shape) for name, shape in shapes.items()}))
    return parts


def check_names(names: Collection[str], blocks: Mapping[str, Block], layout: Layout, where: str) -> None:
    """Refuse tensors that are not the local tensors of a place."""
    missing = [name for name in blocks if name not in names and not layout.is_optional(blocks[name])]
    unexpected = [name for name in names if name not in blocks]
    if missing or unexpected:
        raise ValueError(
            f"the tensors at {where} do not match the layout: missing {missing[:3]} ({len(missing)}), "
            f"unexpected {unexpected[:3]} ({len(unexpected)})"
        )


def _describe(parts_of_chunks: LocalParts) -> list[dict[str, Any]]:
    """Describe chunks to the other ranks: the places, and each tensor's dtype and box."""
    return [
        {
            "place": place.to_json(),
            "tensors": {name: (dtype_name(tensor.dtype), box) for name, (tensor, box) in tensors.items()},
        }
        for place, tensors in parts_of_chunks
    ]


def _chunk(message: Mapping[str, Any], layout: Layout) -> Chunk:
    place = Place(**message["place"])
    whole = layout.at(place)
    blocks: dict[str, Block] = {}
    for name, (_, box) in message["tensors"].items():
        local = name.rpartition("/")[2]
        if local in whole and len(box) == len(whole[local].shape):
            held_block = whole[local].part(tuple((start, stop) for start, stop in box))
            blocks[name] = prefixed(held_block, name.removesuffix(local))
        else:
            blocks[name] = Block.whole(name, ())
    return Chunk(place, blocks, {})
