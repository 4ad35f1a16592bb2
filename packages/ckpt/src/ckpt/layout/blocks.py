"""Make the local tensors of a place from one row of a family's entry."""

from collections.abc import Iterator

from ckpt.layout.config import Config
from ckpt.layout.families.table import Family, Row, Target
from ckpt.layout.pieces import Block, Box, Piece, Shape
from ckpt.layout.place import Place
from ckpt.layout.sizes import Dim, DoesNotDivide, divisors, full_shape, parse_shape


def row_shapes(row: Row, family: Family, config: Config) -> dict[str, Shape]:
    """Return the canonical shape of each source of a row, by name template."""
    return {name: full_shape(parse_shape(text, family, config)) for name, text in row.sources.items()}


def local_block(
    row: Row, place: Place, family: Family, target: Target, config: Config, num_experts: int, vocab_multiple: int
) -> Iterator[tuple[str, Block]]:
    """Yield a row's local tensors at `place`: one, or one for each local expert. `{i}` and `{l}` stay in the names.

    Raises:
        ValueError: A count does not divide over its axis.
    """
    name = row.local_name(target)
    sources = {source: parse_shape(text, family, config) for source, text in row.sources.items()}
    grouped = row.megatron_order == "groups" and target != "parallel"
    shape, pieces = _grouped(sources, place) if grouped else _parts(sources, place, vocab_multiple)
    if not any("{e}" in source for source in sources):
        yield name, Block(shape, pieces)
        return
    experts = _local_experts(num_experts, place)
    if "{j}" in name:
        for index, expert in enumerate(experts):
            yield name.replace("{j}", str(index)), Block(shape, tuple(_for_expert(piece, expert) for piece in pieces))
        return
    stacked = tuple(_for_expert(piece, expert, index) for index, expert in enumerate(experts) for piece in pieces)
    yield name, Block((len(experts), *shape), stacked)


def _local_experts(num_experts: int, place: Place) -> range:
    rank, ranks = place.ep
    if num_experts % ranks:
        raise ValueError(
            f"{num_experts} experts are not divisible by ep={ranks}; use ep in {{{divisors(num_experts)}}}"
        )
    each = num_experts // ranks
    return range(rank * each, (rank + 1) * each)


def _for_expert(piece: Piece, expert: int, index: int | None = None) -> Piece:
    """Return the piece for one expert, in its own tensor or at `index` of a stack."""
    stack: Box = () if index is None else ((index, index + 1),)
    return Piece(piece.name.replace("{e}", str(expert)), piece.canonical_range, stack + piece.local_range)


def _parts(sources: dict[str, tuple[Dim, ...]], place: Place, vocab_multiple: int) -> tuple[Shape, tuple[Piece, ...]]:
    """Concatenate the sources' shards along dimension 0."""
    pieces: list[Piece] = []
    offset = 0
    rest_shape: Shape = ()
    for name, dims in sources.items():
        if not dims:
            return (), (Piece.whole(name, ()),)
        rest = [segment.part(place, vocab_multiple) for (segment,) in dims[1:]]
        rest_range: Box = tuple((start, stop) for start, stop, _ in rest)
        rest_local: Box = tuple((0, stop - start) for start, stop, _ in rest)
        rest_shape = tuple(length for _, _, length in rest)
        canonical_row = 0
        for segment in dims[0]:
            start, stop, length = segment.part(place, vocab_multiple)
            held = stop - start
            if held:
                rows = (canonical_row + start, canonical_row + stop)
                pieces.append(Piece(name, (rows, *rest_range), ((offset, offset + held), *rest_local)))
            if length > held:
                pieces.append(Piece.padding(name, ((offset + held, offset + length), *rest_local)))
            offset += length
            canonical_row += segment.length
    return (offset, *rest_shape), tuple(pieces)


def _grouped(sources: dict[str, tuple[Dim, ...]], place: Place) -> tuple[Shape, tuple[Piece, ...]]:
    """Fuse in Megatron's order, split evenly over tp: query heads, key head and value head of each key-value group.

    With more ranks than groups the even split cuts through groups: Megatron-Core gathers the projection's output and
    takes each rank's heads from the output. The weight is never replicated.

    Raises:
        ValueError: The heads, or the fused rows, do not divide over tp.
    """
    ((query, q_dims), *others) = sources.items()
    (q_segment,) = q_dims[0]
    groups = others[0][1][0][0].count
    if q_segment.count % groups:
        raise ValueError(f"num_attention_heads={q_segment.count} is not divisible by num_key_value_heads={groups}")
    for dims in sources.values():
        dims[0][0].part(place, 1)
    rank, ranks = place.tp
    total = sum(dims[0][0].length for dims in sources.values())
    if total % ranks:
        raise DoesNotDivide(f"the {total} fused rows of queries, keys and values are not divisible by tp={ranks}", "tp")
    low, high = total // ranks * rank, total // ranks * (rank + 1)
    rest: Box = tuple((0, segment.length) for (segment,) in q_dims[1:])
    pieces: list[Piece] = []
    row = 0
    for group in range(groups):
        for name, dims in ((query, q_dims), *others):
            length = dims[0][0].length // groups
            start, stop = max(row, low), min(row + length, high)
            if start < stop:
                canonical = group * length - row
                pieces.append(
                    Piece(name, ((canonical + start, canonical + stop), *rest), ((start - low, stop - low), *rest))
                )
            row += length
    return (high - low, *(size for _, size in rest)), tuple(pieces)
