"""Make canonical tensors, and the local tensors of a place, from one row of a family's entry."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt.layout.config import Config
from ckpt.layout.families import Family, Row, Target
from ckpt.layout.pieces import Block, Box, Piece, Shape
from ckpt.layout.place import Place
from ckpt.layout.sizes import Dim, DoesNotDivide, divisors, full_shape, parse_shape

# A part of a local tensor: its source, the box in the source (None: padding) and the box in the local tensor.
_Part = tuple[str, Box | None, Box]


@dataclass(frozen=True)
class SizedRow:
    """A row of a family's entry on one target, with a configuration's numbers.

    Attributes:
        row: The row.
        family: The family.
        target: The target of the local tensors.
        sources: The dimensions of each source.
        num_experts: The number of routed experts, each of which has the row's tensors; 0: the row is of no expert.
        vocab_multiple: Each rank's vocabulary rows are padded up to a multiple of this.
    """

    row: Row
    family: Family
    target: Target
    sources: Mapping[str, tuple[Dim, ...]]
    num_experts: int
    vocab_multiple: int

    @classmethod
    def of(
        cls, row: Row, family: Family, target: Target, config: Config, num_experts: int, vocab_multiple: int
    ) -> "SizedRow":
        """Return a row with the numbers of a configuration."""
        sources = {name: parse_shape(text, family, config) for name, text in row.sources.items()}
        return cls(row, family, target, sources, num_experts if row.of_experts else 0, vocab_multiple)

    def file_names(self, source: str, layer: int, expert: int) -> tuple[str, ...]:
        """Return the names that files may give a source; the first is the canonical name."""
        prefix = f"model.layers.{layer}." if self.row.where == "layers" else ""
        return self.family.file_names(prefix + source.replace("{e}", str(expert)))

    def canonical(self, layer: int) -> Iterator[tuple[tuple[str, ...], Shape]]:
        """Yield the names in files, the canonical one first, and the shape of every source and expert."""
        for expert in range(self.num_experts or 1):
            for source, dims in self.sources.items():
                yield self.file_names(source, layer, expert), full_shape(dims)

    def local(self, place: Place, layer: int = 0, index: int = 0) -> Iterator[tuple[str, Block]]:
        """Yield the local tensors at `place`: one, or one for each local expert.

        Args:
            place: The place.
            layer: The layer in the model.
            index: The layer in its pipeline chunk.
        """
        name = self.row.local_name(self.target, layer, index)
        grouped = self.row.megatron_order == "groups" and self.target != "parallel"
        shape, parts = self._grouped(place) if grouped else self._parts(place)

        def pieces(expert: int, stack: Box = ()) -> tuple[Piece, ...]:
            return tuple(
                Piece(self.file_names(source, layer, expert)[0], box, stack + local) for source, box, local in parts
            )

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
        if self.num_experts % ranks:
            fits = divisors(self.num_experts)
            raise ValueError(f"{self.num_experts} experts are not divisible by ep={ranks}; use ep in {{{fits}}}")
        each = self.num_experts // ranks
        return range(rank * each, (rank + 1) * each)

    def _parts(self, place: Place) -> tuple[Shape, list[_Part]]:
        """Concatenate the sources' shards along dimension 0."""
        parts: list[_Part] = []
        offset = 0
        rest_shape: Shape = ()
        for name, dims in self.sources.items():
            if not dims:
                return (), [(name, (), ())]
            rest = [segment.part(place, self.vocab_multiple) for (segment,) in dims[1:]]
            rest_range: Box = tuple((start, stop) for start, stop, _ in rest)
            rest_local: Box = tuple((0, stop - start) for start, stop, _ in rest)
            rest_shape = tuple(length for _, _, length in rest)
            canonical_row = 0
            for segment in dims[0]:
                start, stop, length = segment.part(place, self.vocab_multiple)
                held = offset + stop - start
                if start < stop:
                    rows = (canonical_row + start, canonical_row + stop)
                    parts.append((name, (rows, *rest_range), ((offset, held), *rest_local)))
                if held < offset + length:
                    parts.append((name, None, ((held, offset + length), *rest_local)))
                offset += length
                canonical_row += segment.length
        return (offset, *rest_shape), parts

    def _grouped(self, place: Place) -> tuple[Shape, list[_Part]]:
        """Fuse in Megatron's order, split evenly over tp: query heads, key head and value head of each key-value group.

        With more ranks than groups the even split cuts through groups: Megatron-Core gathers the projection's output
        and takes each rank's heads from the output. The weight is never replicated.
        """
        segments = {name: dims[0][0] for name, dims in self.sources.items()}
        query, key, _ = segments.values()
        if query.count % key.count:
            raise ValueError(f"num_attention_heads={query.count} is not divisible by num_key_value_heads={key.count}")
        for segment in segments.values():
            segment.part(place, 1)
        rank, ranks = place.tp
        total = sum(segment.length for segment in segments.values())
        if total % ranks:
            raise DoesNotDivide(
                f"the {total} fused rows of queries, keys and values are not divisible by tp={ranks}", "tp"
            )
        low, high = total // ranks * rank, total // ranks * (rank + 1)
        rest: Box = tuple((0, segment.length) for (segment,) in next(iter(self.sources.values()))[1:])
        parts: list[_Part] = []
        row = 0
        for group in range(key.count):
            for name, segment in segments.items():
                length = segment.length // key.count
                start, stop = max(row, low), min(row + length, high)
                if start < stop:
                    canonical = group * length - row
                    rows, local = (canonical + start, canonical + stop), (start - low, stop - low)
                    parts.append((name, (rows, *rest), (local, *rest)))
                row += length
        return (high - low, *(size for _, size in rest)), parts
