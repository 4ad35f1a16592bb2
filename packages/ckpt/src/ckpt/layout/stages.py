"""Divide the layers of a model over the chunks of a pipeline by their cost."""

from collections.abc import Sequence
from typing import NamedTuple


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
