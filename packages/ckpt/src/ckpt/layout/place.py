"""`Place` and `Grid`: where a rank stands; and the layers of each pipeline chunk, by number or by cost."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Axis = tuple[int, int]
# Larger sizes are refused, because loops over them would not end.
MOST_RANKS = 1 << 20

LayerPlacement = Sequence[int] | None
Layers = tuple[tuple[int, ...], ...]


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Place:
    """One model chunk's coordinates, each `(rank, size)`.

    Attributes:
        tp: Tensor parallelism.
        pp: Pipeline stage.
        vpp: Virtual stage, `(chunk, chunks of a rank)`; a rank with several chunks has a place for each chunk.
        ep: Expert parallelism.
        etp: The split of each expert's matrices; None: as `tp`.
    """

    tp: Axis = (0, 1)
    pp: Axis = (0, 1)
    vpp: Axis = (0, 1)
    ep: Axis = (0, 1)
    etp: Axis | None = None

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "vpp", "ep", "etp"):
            value = getattr(self, axis)
            if value is None and axis == "etp":
                continue
            if not isinstance(value, tuple | list) or len(value) != 2 or not all(map(is_integer, value)):
                raise ValueError(f"Place({axis}={value!r:.100}): write {axis}=(rank, size), two integers")
            if not 0 <= value[0] < value[1]:
                raise ValueError(f"Place({axis}={value}): the rank must lie in [0, size); write {axis}=(rank, size)")
            object.__setattr__(self, axis, tuple(value))

    @property
    def expert_tp(self) -> Axis:
        """The split of an expert's matrices."""
        return self.tp if self.etp is None else self.etp

    @property
    def chunk(self) -> int:
        """The place's position in the pipeline: chunk v of stage p comes at v * pp + p (interleaved order)."""
        return self.vpp[0] * self.pp[1] + self.pp[0]

    @property
    def grid(self) -> "Grid":
        """The grid this place belongs to."""
        return Grid(self.tp[1], self.pp[1], self.vpp[1], self.ep[1], None if self.etp is None else self.etp[1])

    def to_json(self) -> dict[str, Axis | None]:
        """Return the coordinates as JSON values: `Place(**place.to_json())` is the place."""
        return {axis: getattr(self, axis) for axis in ("tp", "pp", "vpp", "ep", "etp")}

    def __str__(self) -> str:
        axes = ((axis, getattr(self, axis)) for axis in ("pp", "vpp", "ep", "etp", "tp"))
        used = [f"{axis}={value[0]}/{value[1]}" for axis, value in axes if value is not None and value[1] > 1]
        return ",".join(used) or "whole"


@dataclass(frozen=True)
class Grid:
    """The sizes of a grid: tensor, pipeline, virtual pipeline, expert and expert-tensor parallel."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "vpp", "ep", "etp"):
            size = getattr(self, axis)
            if size is None and axis == "etp":
                continue
            if not is_integer(size) or not 1 <= size <= MOST_RANKS:
                raise ValueError(f"Grid({axis}={size!r:.100}): a size is an integer from 1 to {MOST_RANKS:,}")
        if self.size > MOST_RANKS:
            raise ValueError(f"{self} has {self.size:,} places; a grid has at most {MOST_RANKS:,}")

    @property
    def chunks(self) -> int:
        """The number of pipeline chunks, pp * vpp."""
        return self.pp * self.vpp

    @property
    def size(self) -> int:
        """The number of places."""
        return self.tp * self.pp * self.vpp * self.ep * (self.etp or 1)

    def places(self) -> Iterator[Place]:
        """Yield every place of the grid; pp outermost, then vpp, ep, etp, and tp innermost."""

        def axis(size: int) -> list[Axis]:
            return [(rank, size) for rank in range(size)]

        expert_axis: Sequence[Axis | None] = [None] if self.etp is None else axis(self.etp)
        for pp, vpp, ep, etp, tp in itertools.product(
            axis(self.pp), axis(self.vpp), axis(self.ep), expert_axis, axis(self.tp)
        ):
            yield Place(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp)


def place_layers(num_layers: int, chunks: int, counts: Sequence[int]) -> Layers:
    """Return the layers of each pipeline chunk, in pipeline order.

    Args:
        num_layers: Layers of the model.
        chunks: The number of pipeline chunks, `pp * vpp`.
        counts: The number of layers of each chunk.
    """
    if not isinstance(counts, Sequence) or not all(map(is_integer, counts)):
        raise ValueError(f"layers={counts!r:.100} is unknown; use None or a list of counts")
    if len(counts) != chunks:
        raise ValueError(f"layers={list(counts)} has {len(counts)} entries for pp * vpp = {chunks} chunks")
    if sum(counts) != num_layers or min(counts) < 0:
        raise ValueError(f"layers={list(counts)} sums to {sum(counts)}; the model has num_hidden_layers={num_layers}")
    ends = list(itertools.accumulate(counts))
    return tuple(tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True))


class Cost(NamedTuple):
    """The cost of a part of a model: `computed` weights multiply each token, and a rank holds `held` weights."""

    computed: int
    held: int


def split_by_cost(layers: Sequence[Cost], first: Cost, last: Cost, chunks: int) -> list[int]:
    """Return the number of layers of each chunk, at least one.

    The slowest chunk sets the pace of a pipeline: its computation is within 1 % of the least that any split has. Among
    these splits, the fullest chunk of the result holds at most 1 % more weights than necessary. Layers that may be in
    either of two chunks are in the later chunk: earlier chunks keep the activations of more micro-batches.

    Args:
        layers: The cost of each layer.
        first: The further cost of the first chunk (the embedding).
        last: The further cost of the last chunk (the head).
        chunks: The number of chunks.

    Raises:
        ValueError: There are fewer layers than chunks.
    """
    if len(layers) < chunks:
        raise ValueError(
            f"num_hidden_layers={len(layers)} is fewer than the {chunks} chunks of the pipeline (pp * virtual stages); "
            f"every chunk needs a layer: use at most {len(layers)} chunks"
        )
    if chunks == 1:
        return [len(layers)]
    # The first layer is in the first chunk, and the last layer in the last.
    costs = [*reversed(layers)]
    for index, end in ((-1, first), (0, last)):
        costs[index] = Cost(costs[index].computed + end.computed, costs[index].held + end.held)
    limits = [sum(cost.computed for cost in costs), sum(cost.held for cost in costs)]
    for kind in range(2):
        low, high = max(cost[kind] for cost in costs), limits[kind]
        while low < high:
            limits[kind] = (low + high) // 2
            if len(_filled(costs, chunks, limits)) <= chunks:
                high = limits[kind]
            else:
                low = limits[kind] + 1
        limits[kind] = high + high // 100
    return _filled(costs, chunks, limits)[::-1]


def _filled(costs: Sequence[Cost], chunks: int, limits: Sequence[int]) -> list[int]:
    """Return the layers of each chunk, filled up to the limits one after the other; of `chunks` chunks or more."""
    counts: list[int] = []
    computed = held = 0
    for index, cost in enumerate(costs):
        full = computed + cost.computed > limits[0] or held + cost.held > limits[1]
        # Each chunk that is still to come needs one of the layers that are left.
        if not counts or full or len(costs) - index <= chunks - len(counts):
            counts.append(0)
            computed = held = 0
        counts[-1] += 1
        computed, held = computed + cost.computed, held + cost.held
    return counts
