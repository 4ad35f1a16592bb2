from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from ckpt.layout.pieces import Block, Box, Piece, cover_problem, full_box, intersect


def test_a_block_refuses_a_gap_and_an_overlap() -> None:
    upper = Piece("w", ((0, 2), (0, 3)), ((0, 2), (0, 3)))
    lower = Piece("w", ((2, 4), (0, 3)), ((2, 4), (0, 3)))
    Block((4, 3), (lower, upper))
    with pytest.raises(ValueError, match=r"\(2,\) is covered 0 times|covered 0 times"):
        Block((4, 3), (upper,))
    with pytest.raises(ValueError, match="covered 2 times"):
        Block((4, 3), (upper, lower, Piece("w", None, ((1, 2), (2, 3)))))
    with pytest.raises(ValueError, match="outside"):
        Block((3, 3), (upper, lower))


def test_a_piece_refuses_unequal_extents_and_empty_ranges() -> None:
    with pytest.raises(ValueError, match="differ in extent"):
        Piece("w", ((0, 2), (0, 3)), ((0, 3), (0, 2)))
    with pytest.raises(ValueError, match="empty"):
        Piece("w", ((0, 0),), ((0, 0),))
    Piece("w", ((0, 2), (0, 3)), ((5, 6), (0, 2), (0, 3)))


def test_scalars_and_empty_tensors_are_covered() -> None:
    assert Block.whole("scale", ()).pieces[0].local_range == ()
    assert Block.whole("empty", (0, 4)).pieces == ()


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that partition it: a grid of cuts, so that removing or repeating one box breaks the cover."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    ranges = []
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        ranges.append(list(itertools.pairwise(cuts)))
    return shape, [tuple(box) for box in itertools.product(*ranges)]


@given(partitions(), st.data())
def test_cover_problem_finds_exactly_the_broken_covers(
    partition: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = partition
    assert cover_problem(data.draw(st.permutations(boxes)), shape) is None
    chosen = data.draw(st.sampled_from(boxes))
    assert cover_problem([box for box in boxes if box != chosen], shape) is not None
    assert cover_problem([*boxes, chosen], shape) is not None


@given(partitions(), partitions(), st.data())
def test_intersections_carry_every_element_from_one_partition_to_another(
    first: tuple[tuple[int, ...], list[Box]], second: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    """Two partitions of one canonical tensor, laid out with offsets of their own: copying all intersections is
    exact."""
    shape, boxes = first
    if len(second[0]) != len(shape):
        second = first
    # Cut the second partition down to the first's shape.
    others = [tuple((min(a, s), min(b, s)) for (a, b), s in zip(box, shape, strict=True)) for box in second[1]]
    others = [box for box in others if all(a < b for a, b in box)]
    if cover_problem(others, shape) is not None:
        others = [full_box(shape)]
    canonical = torch.arange(torch.Size(shape).numel()).reshape(shape)
    shift = data.draw(st.integers(0, 3))
    pieces = [Piece("w", box, tuple((a + shift, b + shift) for a, b in box)) for box in boxes]
    source = torch.zeros([size + shift for size in shape], dtype=torch.int64)
    source[tuple(slice(shift, None) for _ in shape)] = canonical
    stack = data.draw(st.booleans())
    result = torch.full(shape, -1)
    for other in others:
        local = tuple((0, b - a) for a, b in other)
        destination = Piece("w", other, ((2, 3), *local) if stack else local)
        held = torch.full([3, *(b for _, b in local)] if stack else [b for _, b in local], -1)
        for piece in pieces:
            copy = intersect(piece, destination)
            if copy is not None:
                taken = source[tuple(slice(a, b) for a, b in copy.source_range)]
                at = tuple(slice(a, b) for a, b in copy.destination_range)
                held[at] = taken if not stack else taken.unsqueeze(0)
        result[tuple(slice(a, b) for a, b in other)] = held[2] if stack else held
    assert torch.equal(result, canonical)


@given(partitions(), st.data())
def test_the_part_of_a_block_holds_what_slicing_the_tensor_gives(
    partition: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = partition
    shift = data.draw(st.integers(0, 3))
    drop = data.draw(st.booleans()) and shape[0] == 1 and len(shape) > 1
    pieces = []
    for number, box in enumerate(boxes):
        canonical = tuple((a + shift, b + shift) for a, b in box)[1 if drop else 0 :]
        padding = number == 0 and len(boxes) > 1
        pieces.append(Piece("w", None if padding else canonical, box))
    wanted = tuple(tuple(sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in shape)
    part = Block(shape, tuple(pieces)).part(wanted)
    assert part.shape == tuple(b - a for a, b in wanted)
    canonical_shape = [size + shift for size in shape][1 if drop else 0 :]
    source = torch.arange(1, 1 + torch.Size(canonical_shape).numel()).reshape(canonical_shape)

    def assemble(block: Block) -> torch.Tensor:
        out = torch.zeros(block.shape, dtype=torch.int64)
        for piece in block.pieces:
            if piece.canonical_range is not None:
                values = source[tuple(slice(a, b) for a, b in piece.canonical_range)]
                out[tuple(slice(a, b) for a, b in piece.local_range)] = values
        return out

    whole = assemble(Block(shape, tuple(pieces)))
    assert torch.equal(assemble(part), whole[tuple(slice(a, b) for a, b in wanted)])
