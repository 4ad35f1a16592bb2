"""Make canonical tensors, and the local tensors of a place, from one row of a family's entry."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt.layout.config import Config, integer
from ckpt.layout.families.table import SIZES, Family, Row, Size, Target
from ckpt.layout.pieces import Block, Box, Piece, Shape
from ckpt.layout.place import Place

Range = tuple[int, int]
# A part of a local tensor: its source, the box in the source (None: padding) and the box in the local tensor.
_Part = tuple[str, Box | None, Box]


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
        axis: "tp", "etp", "ep", or None where every rank holds all.
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
        axes = {None: (0, 1), "tp": place.tp, "etp": place.expert_tp, "ep": place.ep}
        rank, ranks = axes[self.axis]
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


Dim = tuple[Segment, ...]


def dimensions(text: str, config: Config) -> tuple[Dim, ...]:
    """Return the dimensions of a shape such as "Q/tp H"."""
    return tuple(tuple(_segment(term, config) for term in dim.split("+")) for dim in text.split())


def _segment(term: str, config: Config) -> Segment:
    symbol, _, axis = term.partition("/")
    size = SIZES[symbol]
    return Segment(size.count, _evaluate(size.count, config), _evaluate(size.unit, config), axis or None, size)


def _evaluate(expression: str, config: Config) -> int:
    """Return a sum of products of config fields and numbers."""
    return sum(
        math.prod(int(word) if word.isdigit() else integer(config, word) for word in term.split(" * "))
        for term in expression.split(" + ")
    )


@dataclass(frozen=True)
class SizedRow:
    """A row of a family's entry on one target, with a configuration's numbers.

    `sources` has the dimensions of each source. `num_experts` is the number of routed experts, each of which has the
    row's tensors; 0: the row belongs to no expert. Each rank's vocabulary rows are padded up to a multiple of
    `vocab_multiple`. `groups` is the number of groups of `Row.interleaved`. `columns` are the columns that a chunk
    holds; None: all.
    """

    row: Row
    family: Family
    target: Target
    sources: Mapping[str, tuple[Dim, ...]]
    num_experts: int
    vocab_multiple: int
    groups: int = 1
    columns: Range | None = None

    def of_layers(self, layers: Sequence[int], num_layers: int) -> "SizedRow":
        """Return the row with the columns of consecutive layers, of which all have equally many."""
        (dims,) = self.sources.values()
        width = sum(segment.length for segment in dims[-1]) // num_layers
        return dataclasses.replace(self, columns=(width * layers[0], width * (layers[-1] + 1)))

    @property
    def of_experts(self) -> bool:
        """Return whether the row's tensors are of routed experts, one by one or stacked in files, too."""
        return bool(self.num_experts) or any(dims and dims[0][0].axis == "ep" for dims in self.sources.values())

    @property
    def numel(self) -> int:
        """The elements of the row's tensors in one layer, all experts included."""
        shapes = [[sum(segment.length for segment in dim) for dim in dims] for dims in self.sources.values()]
        if self.columns is not None:
            shapes[0][-1] = self.columns[1] - self.columns[0]
        return sum(map(math.prod, shapes)) * (self.num_experts or 1)

    def file_names(self, source: str, layer: int, expert: int) -> tuple[str, ...]:
        """Return the names that files may give a source; the first is the canonical name."""
        numbered = self.row.in_layer and not source.startswith("mtp.")
        prefix = f"model.layers.{layer}." if numbered else ""
        return self.family.file_names(prefix + source.replace("{e}", str(expert)))

    def canonical(self, layer: int) -> Iterator[tuple[tuple[str, ...], Shape]]:
        """Yield the names in files, the canonical one first, and the shape of every source and expert."""
        aliases = self.row.aliases
        if self.row.where == "layers":
            aliases = tuple(name for alias in aliases for name in self.file_names(alias, layer, 0))
        for expert in range(self.num_experts or 1):
            for source, dims in self.sources.items():
                shape = tuple(sum(segment.length for segment in dim) for dim in dims)
                name, *others = self.file_names(source, layer, expert)
                yield (name, *aliases, *others), shape

    def local(self, place: Place, layer: int = 0, index: int = 0) -> Iterator[tuple[str, Block]]:
        """Yield the local tensors of a layer, the `index`th of its chunk: one, or one for each local expert."""
        name = self.row.local_name(self.target, layer, index)
        grouped = self.row.megatron_order == "groups" and self.target != "parallel"
        shape, parts = self._grouped(place) if grouped else self._parts(place)
        if self.columns is not None:
            held = (0, self.columns[1] - self.columns[0])
            shape = (*shape[:-1], held[1])
            parts = [(source, box and (*box[:-1], self.columns), (*local[:-1], held)) for source, box, local in parts]
        if self.row.flat:
            shape = shape[self.row.flat :]
            parts = [(source, box, local[self.row.flat :]) for source, box, local in parts]

        def pieces(expert: int, stack: Box = ()) -> tuple[Piece, ...]:
            return tuple(
                Piece(self.file_names(source, layer, expert)[0], box, stack + local) for source, box, local in parts
            )

        if not self.num_experts and "{j}" in name:
            # Files stack the experts; a rank holds each expert in a separate tensor.
            for j in range(shape[0]):
                yield name.replace("{j}", str(j)), Block(shape[1:], tuple(_of_stack(piece, j) for piece in pieces(0)))
            return
        if not self.num_experts:
            yield name, Block(shape, pieces(0))
            return
        experts = list(enumerate(self._local_experts(place)))
        if "{j}" in name:
            for j, expert in experts:
                yield name.replace("{j}", str(j)), Block(shape, pieces(expert))
        else:
            stacked = tuple(piece for j, expert in experts for piece in pieces(expert, ((j, j + 1),)))
            yield name, Block((len(experts), *shape), stacked)

    def _local_experts(self, place: Place) -> range:
        rank, ranks = place.ep
        each = self.num_experts // ranks
        return range(rank * each, (rank + 1) * each)

    def _parts(self, place: Place) -> tuple[Shape, list[_Part]]:
        """Concatenate the sources' shards along dimension 0."""
        parts: list[_Part] = []
        offset = 0
        shape: Shape = ()
        for name, dims in self.sources.items():
            if not dims:
                return (), [(name, (), ())]
            lengths, runs = zip(*(self._runs(dim, place) for dim in dims), strict=True)
            for run in itertools.product(*runs):
                (start, stop), *rest = (local for _, local in run)
                ranges = [canonical for canonical, _ in run]
                box = None if None in ranges else tuple(each for each in ranges if each is not None)
                parts.append((name, box, ((offset + start, offset + stop), *rest)))
            offset += lengths[0]
            shape = (offset, *lengths[1:])
        return shape, parts

    def _runs(self, dim: Dim, place: Place) -> tuple[int, list[tuple[Range | None, Range]]]:
        """Return the local length of a dimension and its runs: (range in the source, None for padding; local range)."""
        runs: list[tuple[Range | None, Range]] = []
        offset = canonical = 0
        groups = self.groups if len(dim) > 1 else 1
        stride = sum(segment.length for segment in dim) // groups
        for segment in dim:
            start, stop, length = segment.part(place, self.vocab_multiple)
            held = offset + stop - start
            if segment.count % groups:
                raise ValueError(f"{segment.label}={segment.count} is not divisible into {groups} groups")
            width = segment.length // groups
            # A group that begins in this rank's rows is complete there: the ranks divide the groups, too.
            for group in range(start // width, stop // width) if groups > 1 else ():
                first, local = group * stride + canonical, offset + group * width - start
                runs.append(((first, first + width), (local, local + width)))
            if start < stop and groups == 1:
                runs.append(((canonical + start, canonical + stop), (offset, held)))
            if held < offset + length:
                runs.append((None, (held, offset + length)))
            offset += length
            canonical += width
        return offset, runs

    def _grouped(self, place: Place) -> tuple[Shape, list[_Part]]:
        """Fuse in Megatron's order, split evenly over tp: query heads, key head and value head of each key-value group.

        With more ranks than groups the even split cuts through groups: Megatron-Core gathers the projection's output
        and takes each rank's heads from the output. The weight is never replicated.
        """
        # Each segment with its source and its first row there; files of some families fuse all three.
        segments = [
            (name, segment, sum(other.length for other in dims[0][:number]))
            for name, dims in self.sources.items()
            for number, segment in enumerate(dims[0])
        ]
        (_, query, _), (_, key, _), _ = segments
        if query.count % key.count:
            raise ValueError(f"num_attention_heads={query.count} is not divisible by num_key_value_heads={key.count}")
        for _, segment, _ in segments:
            segment.part(place, 1)
        rank, ranks = place.tp
        total = sum(segment.length for _, segment, _ in segments)
        if total % ranks:
            raise DoesNotDivide(
                f"the {total} fused rows of queries, keys and values are not divisible by tp={ranks}", "tp"
            )
        low, high = total // ranks * rank, total // ranks * (rank + 1)
        rest: Box = tuple((0, segment.length) for (segment,) in next(iter(self.sources.values()))[1:])
        parts: list[_Part] = []
        row = 0
        for group in range(key.count):
            for name, segment, first in segments:
                length = segment.length // key.count
                start, stop = max(row, low), min(row + length, high)
                if start < stop:
                    canonical = first + group * length - row
                    rows, local = (canonical + start, canonical + stop), (start - low, stop - low)
                    parts.append((name, (rows, *rest), (local, *rest)))
                row += length
        return (high - low, *(size for _, size in rest)), parts


def _of_stack(piece: Piece, index: int) -> Piece:
    """Return the piece of one entry of a stack from the piece of all."""
    canonical = piece.canonical_range
    if canonical is not None:
        first = canonical[0][0] + index
        canonical = ((first, first + 1), *canonical[1:])
    return Piece(piece.name, canonical, piece.local_range[1:])
