"""Which rank writes what: every box of every canonical tensor once, replicas spread over the ranks that hold them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt.layout import Layout
from ckpt.pieces import Box, Piece, distinct_cover_problem, volume
from ckpt.place import Place


@dataclass(frozen=True, slots=True)
class Held:
    """A piece in a rank's hands: rank of the group, which of its chunks, local tensor, piece."""

    rank: int
    chunk: int
    local: str
    piece: Piece


def assign_owners(layout: Layout, places: Sequence[Sequence[Place]], present: Iterable[str]) -> dict[str, list[Held]]:
    """Choose one holder for every box of every present canonical tensor, by the least elements given to it so far.

    Args:
        layout: the layout.
        places: for each rank, the places of the chunks it holds.
        present: the canonical tensors to write.

    Returns:
        Canonical name -> the pieces that together hold each of its elements once; the same on every rank.

    Raises:
        ValueError: the ranks together do not hold a whole tensor.
    """
    holders: dict[str, dict[Box, list[Held]]] = {name: {} for name in present}
    for rank, chunks in enumerate(places):
        for chunk, place in enumerate(chunks):
            for local, block in layout.at(place).items():
                for piece in block.pieces:
                    if piece.canonical_range is not None and piece.name in holders:
                        held = Held(rank, chunk, local, piece)
                        holders[piece.name].setdefault(piece.canonical_range, []).append(held)
    load = [0] * len(places)
    owners: dict[str, list[Held]] = {}
    for name, boxes in holders.items():
        problem = distinct_cover_problem(boxes, layout.canonical[name].shape)
        if problem:
            listed = ", ".join(str(place) for chunks in places for place in chunks)
            raise ValueError(
                f"the ranks do not hold all of {name}: {problem}; their places are {listed}. Save with a group "
                "that spans the whole grid, each rank with its own place"
            )
        owners[name] = []
        for box, candidates in boxes.items():
            owner = min(candidates, key=lambda held: (load[held.rank], held.rank))
            load[owner.rank] += volume(box)
            owners[name].append(owner)
    return owners
