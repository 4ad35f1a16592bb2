"""Count the micro-batches that a pipeline stage has begun and not ended."""

from collections import Counter


def in_flight(stage: tuple[int, int], virtual_stages: int) -> list[int]:
    """Return the largest number of micro-batches in flight for each chunk of a stage `(rank, size)`.

    1F1B: the number of stages from this stage to the last. Interleaved (arXiv:2104.04473, section 2.2): chunks take
    turns of `size` micro-batches; a rank starts with `size` for each chunk but one, two for each later stage, and one.
    """
    rank, size = stage
    if virtual_stages == 1:
        return [size - rank]
    begun = (virtual_stages - 1) * size + 2 * (size - 1 - rank) + 1
    turns = Counter(n // size % virtual_stages for n in range(begun))
    return [turns[chunk] for chunk in range(virtual_stages)]
