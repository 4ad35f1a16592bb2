"""Turn an entry's shapes in symbols into numbers: each dimension's length, and the part that a rank holds."""

import math
from dataclasses import dataclass

from ckpt.layout.config import Config, integer
from ckpt.layout.families import Family, Size
from ckpt.layout.pieces import Shape
from ckpt.layout.place import Place


class DoesNotDivide(ValueError):
    """A size of the model does not divide over an axis of the grid."""

    def __init__(self, message: str, axis: str) -> None:
        super().__init__(message)
        self.axis = axis


@dataclass(frozen=True)
class Segment:
    """A part of one dimension that is split by itself.

    Attributes:
        label: The config fields behind the count, for messages.
        count: Units in the full tensor.
        unit: Elements of one unit.
        axis: "tp", "etp", or None where every rank holds all.
        size: The symbol, with its rules for splitting.
    """

    label: str
    count: int
    unit: int
    axis: str | None
    size: Size

    @property
    def length(self) -> int:
        """Elements in the full tensor."""
        return self.count * self.unit

    def part(self, place: Place, vocab_multiple: int) -> tuple[int, int, int]:
        """Return this place's part, in elements: (start, stop, local length). The local length includes the padding.

        Raises:
            DoesNotDivide: The count does not divide over the axis; names the field.
        """
        rank, ranks = (0, 1) if self.axis is None else place.expert_tp if self.axis == "etp" else place.tp
        if self.size.pad and self.axis is not None:
            rows = -(-self.count // (ranks * vocab_multiple)) * vocab_multiple
            start, stop = (min(edge * rows, self.count) for edge in (rank, rank + 1))
            return start * self.unit, stop * self.unit, rows * self.unit
        if self.count % ranks == 0:
            units = self.count // ranks
            return rank * units * self.unit, (rank + 1) * units * self.unit, units * self.unit
        if self.size.replicate and ranks % self.count == 0:
            held = rank * self.count // ranks
            return held * self.unit, (held + 1) * self.unit, self.unit
        # Without etp, tp splits the experts.
        axis = "tp" if place.etp is None else str(self.axis)
        if self.size.replicate:
            raise DoesNotDivide(
                f"{self.label}={self.count} neither divides {axis}={ranks} nor is divisible by it", axis
            )
        raise DoesNotDivide(f"{self.label}={self.count} is not divisible by {axis}={ranks}", axis)


def divisors(count: int) -> str:
    """Return the divisors of a count up to 1024, as text for messages."""
    return ", ".join(str(size) for size in range(1, min(count, 1024) + 1) if count % size == 0)


Dim = tuple[Segment, ...]


def parse_shape(text: str, family: Family, config: Config) -> tuple[Dim, ...]:
    """Return the dimensions of a shape such as "Q/tp H". Only the first dimension may have several segments."""
    return tuple(tuple(_segment(term, family, config) for term in dim.split("+")) for dim in text.split())


def _segment(term: str, family: Family, config: Config) -> Segment:
    symbol, _, axis = term.partition("/")
    size = family.sizes[symbol]
    return Segment(size.count, _evaluate(size.count, config), _evaluate(size.unit, config), axis or None, size)


def _evaluate(expression: str, config: Config) -> int:
    """Return a sum of products of config fields and numbers."""
    return sum(
        math.prod(int(word) if word.isdigit() else integer(config, word) for word in term.split(" * "))
        for term in expression.split(" + ")
    )


def full_shape(dims: tuple[Dim, ...]) -> Shape:
    """Return the canonical tensor's shape."""
    return tuple(sum(segment.length for segment in dim) for dim in dims)
