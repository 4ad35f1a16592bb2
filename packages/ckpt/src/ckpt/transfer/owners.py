"""Assign every box of every canonical tensor to one of the ranks that hold the box; replicas share the work."""

from dataclasses import dataclass

from ckpt.layout.pieces import Box, Piece, cover_problem, volume
from ckpt.transfer.holdings import Holdings


@dataclass(frozen=True, slots=True)
class Held:
    """A piece that a rank holds: the rank in the group, its chunk, the local tensor and the piece."""

    rank: int
    chunk: int
    local: str
    piece: Piece


def assign_owners(holdings: Holdings) -> dict[str, list[Held]]:
    """Choose an owner for every box of every canonical tensor: the holder with the fewest elements so far.

    Returns:
        Canonical name -> the pieces that together hold each of its elements once; the same on every rank.

    Raises:
        ValueError: The ranks together lack a part of a tensor, or divide its copies in two ways.
    """
    holders: dict[str, dict[Box, list[Held]]] = {name: {} for name in holdings.dtypes}
    for rank, chunks in enumerate(holdings.ranks):
        for index, chunk in enumerate(chunks):
            for local, block in chunk.blocks.items():
                for piece in block.pieces:
                    if piece.canonical_range is not None and piece.name in holders:
                        held = Held(rank, index, local, piece)
                        holders[piece.name].setdefault(piece.canonical_range, []).append(held)
    load = [0] * len(holdings.ranks)
    owners: dict[str, list[Held]] = {}
    for name, boxes in holders.items():
        problem = cover_problem(sorted(boxes), holdings.layout.canonical[name].shape)
        if problem:
            listed = ", ".join(str(chunk.place) for chunks in holdings.ranks for chunk in chunks)
            raise ValueError(
                f"the ranks do not hold all of {name} once: {problem}; their places are {listed}. Pass a group that "
                "spans the whole grid, each rank with its own place, and divide all copies of a tensor alike"
            )
        owners[name] = []
        for box, candidates in boxes.items():
            owner = min(candidates, key=lambda held: (load[held.rank], held.rank))
            load[owner.rank] += volume(box)
            owners[name].append(owner)
    return owners
