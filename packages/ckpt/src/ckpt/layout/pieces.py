"""Describe shards as data: canonical tensors, boxes of them, and the arithmetic on boxes.

A *box* is one `(start, stop)` range for each dimension. A rank's parameters and a file's tensors are both described by
pieces, so loading, saving and resharding are one operation: intersect the pieces of two descriptions on their canonical
coordinates and copy the intersections.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor of `shape`."""
    return tuple((0, size) for size in shape)


def extents(box: Box) -> Shape:
    """Return the lengths of a box's sides."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def relative(inner: Box, box: Box) -> Box:
    """Return a box inside another box, counted from the outer box's first corner."""
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(inner, box, strict=True))


def carried_over(inner: Box, copy: "Copy") -> Box:
    """Return the box of the destination that a box inside a copy's source box fills."""
    inside = relative(inner, copy.source_range)
    # The destination may lack, or have more, leading dimensions of 1.
    extra = len(copy.destination_range) - len(inside)
    return tuple(
        (start, stop) if dim < extra else (start + inside[dim - extra][0], start + inside[dim - extra][1])
        for dim, (start, stop) in enumerate(copy.destination_range)
    )


def exchanged(sides: tuple[T, ...]) -> tuple[T, ...]:
    """Return a box or a shape with its last two dimensions exchanged."""
    return (*sides[:-2], *sides[:-3:-1])


def split_box(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box along its leading dimensions into boxes of at most `limit` elements, in row-major order."""
    if not box or volume(box) <= limit:
        yield box
        return
    (start, stop), rest = box[0], box[1:]
    rows = limit // volume(rest)
    if rows:
        for first in range(start, stop, rows):
            yield ((first, min(first + rows, stop)), *rest)
    else:
        for index in range(start, stop):
            for rest_box in split_box(rest, limit):
                yield ((index, index + 1), *rest_box)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a canonical tensor, and the box of a local tensor that holds it.

    Both boxes have the same extents. One may have more dimensions than the other; the extra dimensions lead and have
    extent 1 (a stack of experts holds each expert's matrix at one index). Elements correspond in row-major order.

    Attributes:
        name: The canonical tensor.
        canonical_range: The box in the canonical tensor; None: zeros beside the tensor, which loads write and saves
            omit.
        local_range: The box in the local tensor.
    """

    name: str
    canonical_range: Box | None
    local_range: Box

    def __post_init__(self) -> None:
        canonical = self.local_range if self.canonical_range is None else self.canonical_range
        for box in (canonical, self.local_range):
            if any(not 0 <= start < stop for start, stop in box):
                raise ValueError(f"piece of {self.name!r}: {box} has an empty or negative range; omit empty pieces")
        common = min(len(canonical), len(self.local_range))
        trailing = [extents(box[len(box) - common :]) for box in (canonical, self.local_range)]
        if trailing[0] != trailing[1] or volume(canonical) != volume(self.local_range):
            raise ValueError(
                f"piece of {self.name!r}: {canonical} and {self.local_range} differ in extent; "
                "only leading dimensions of 1 may be extra"
            )

    @classmethod
    def of_box(cls, name: str, box: Box) -> "Piece":
        """Return a box of a canonical tensor, as a local tensor of the box's extents."""
        return cls(name, box, full_box(extents(box)))

    @classmethod
    def whole(cls, name: str, shape: Shape) -> "Piece":
        """Return the piece that is all of a canonical tensor."""
        return cls.of_box(name, full_box(shape))

    @property
    def is_padding(self) -> bool:
        """Return whether this piece is zeros."""
        return self.canonical_range is None


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor's shape and the pieces that cover each of its elements exactly once.

    Raises:
        ValueError: A piece reaches outside the shape, or an element is covered twice or never.
    """

    shape: Shape
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        problem = cover_problem([piece.local_range for piece in self.pieces], self.shape)
        if problem:
            raise ValueError(f"a tensor of shape {self.shape} is not covered exactly once by its pieces: {problem}")

    @classmethod
    def whole(cls, name: str, shape: Shape) -> "Block":
        """Return the block of a whole canonical tensor, in one piece."""
        return cls(shape, (Piece.whole(name, shape),) if math.prod(shape) else ())

    @property
    def numel(self) -> int:
        """The number of elements, padding included."""
        return math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical tensors that make up this tensor, in order of first appearance."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces))

    def part(self, box: Box) -> "Block":
        """Return the block of the tensor `tensor[box]`, which FSDP2 leaves on a data-parallel rank."""
        if box == full_box(self.shape):
            return self
        # The intersection, in local coordinates: the piece and the box are both parts of the local tensor.
        if not volume(box):
            return Block(extents(box), ())
        wanted, pieces = Piece("", box, relative(box, box)), []
        for piece in self.pieces:
            there = piece.local_range if piece.canonical_range is None else piece.canonical_range
            copy = intersect(Piece("", piece.local_range, there), wanted)
            if copy is not None:
                canonical = None if piece.is_padding else copy.source_range
                pieces.append(Piece(piece.name, canonical, copy.destination_range))
        return Block(extents(box), tuple(pieces))


def shapes_of(pieces: Iterable[Piece]) -> dict[str, Shape]:
    """Return the shapes of the canonical tensors of which pieces hold every element."""
    shapes: dict[str, Shape] = {}
    for piece in pieces:
        if piece.canonical_range is not None:
            stops = tuple(stop for _, stop in piece.canonical_range)
            shapes[piece.name] = tuple(map(max, shapes.get(piece.name, stops), stops))
    return shapes


def cover_problem(boxes: Sequence[Box], shape: Shape) -> str | None:
    """Return why `boxes` do not cover every element of `shape` exactly once, or None when they do.

    Sweeps over the first dimension: between two neighbouring cuts the set of boxes is constant, and their remaining
    dimensions must cover the remaining shape.
    """
    for box in boxes:
        if len(box) != len(shape) or any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
            return f"{box} reaches outside {shape}"
    return _sweep(boxes, shape, ())


def _sweep(boxes: Sequence[Box], shape: Shape, at: tuple[int, ...]) -> str | None:
    if not shape:
        if len(boxes) == 1:
            return None
        return f"the element at {at} is covered {len(boxes)} times"
    if math.prod(shape) == 0:
        return None if not boxes else f"{boxes[0]} lies in an empty tensor"
    opening: dict[int, list[Box]] = {}
    for box in boxes:
        opening.setdefault(box[0][0], []).append(box)
    cuts = sorted({0, shape[0], *(edge for box in boxes for edge in box[0])})
    active: list[Box] = []
    for start in cuts[:-1]:
        active = [box for box in active if box[0][1] > start] + opening.get(start, [])
        if len(active) == 1 and active[0][1:] == full_box(shape[1:]):
            continue
        problem = _sweep([box[1:] for box in active], shape[1:], (*at, start))
        if problem:
            return problem
    return None


@dataclass(frozen=True, slots=True)
class Copy:
    """The part that two pieces share: a box in the source's tensor and the box of equal extent in the destination's."""

    source_range: Box
    destination_range: Box


def intersect(source: Piece, destination: Piece) -> Copy | None:
    """Return the copy of what two pieces of one canonical tensor share; None when they share nothing."""
    assert source.canonical_range is not None
    assert destination.canonical_range is not None
    source_range = list(source.local_range)
    destination_range = list(destination.local_range)
    dims = len(source.canonical_range)
    for dim, (a, b) in enumerate(zip(source.canonical_range, destination.canonical_range, strict=True)):
        start, stop = max(a[0], b[0]), min(a[1], b[1])
        if start >= stop:
            return None
        for piece, side, result in ((source, a, source_range), (destination, b, destination_range)):
            # Dimensions are aligned at the right; a canonical dimension that the local tensor lacks has extent 1 in it.
            local_dim = len(result) - dims + dim
            if local_dim >= 0:
                local_start = piece.local_range[local_dim][0] + start - side[0]
                result[local_dim] = (local_start, local_start + stop - start)
    return Copy(tuple(source_range), tuple(destination_range))


def shared(destination: Block, sources: dict[str, list[tuple[str, Piece]]]) -> Iterator[tuple[str, Copy]]:
    """Yield every copy that fills `destination` from the indexed sources: (source tensor, copy), padding excepted.

    All replicas in the index are yielded: pass an index without replicas to get each element once.
    """
    for piece in destination.pieces:
        if piece.is_padding:
            continue
        for tensor, candidate in sources.get(piece.name, ()):
            copy = intersect(candidate, piece)
            if copy is not None:
                yield tensor, copy


@dataclass(frozen=True)
class Canonical:
    """A canonical tensor: its full shape, and how files may hold the tensor.

    Attributes:
        shape: The full shape.
        optional: Whether a file and a rank may lack the tensor.
        aliases: Other names in files.
        transposable: Whether files may hold the tensor with its last two dimensions exchanged.
        keep_dtype: Whether loads ignore `dtype` and keep the stored dtype.
        copy_of: The canonical tensor that a model shares for this tensor; None: the model shares none.
        carried: Whether the tensor is copied whole, without a known structure.
    """

    shape: Shape
    optional: bool = False
    aliases: tuple[str, ...] = ()
    transposable: bool = False
    keep_dtype: bool = False
    copy_of: str | None = None
    carried: bool = False


def other_order(canonical: Mapping[str, Canonical], stored: Mapping[str, Shape]) -> Literal["", "free", "kept"]:
    """Return whether files hold the transposable matrices with the last two dimensions exchanged, given all shapes.

    All such matrices of a checkpoint have the same order, which the non-square matrices show. Readers that look at
    each matrix by itself, as transformers does, always take a square matrix for the other order.

    Returns:
        "" for the canonical order; "free" where the shapes show the other order; "kept" where a matrix is square, so
        that a save must keep the other order.
    """
    pairs = [(entry.shape, stored[name]) for name, entry in canonical.items() if entry.transposable and name in stored]
    if all(shape == other for shape, other in pairs) or any(exchanged(other) != shape for shape, other in pairs):
        return ""
    return "kept" if any(shape == other for shape, other in pairs) else "free"
