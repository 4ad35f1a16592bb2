"""The distribution of a pack's tokens over the context-parallel group.

Shape legend: T tokens of the whole pack, n ranks, r this rank.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed.collectives import gather_from_sequence_parallel, scatter_to_sequence_parallel

Layout = Literal["contiguous", "zigzag"]


def chunks_per_rank(layout: Layout) -> int:
    """Return the number of chunks of consecutive tokens per rank; raise ValueError for an unknown layout."""
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r} is unknown; use one of {', '.join(get_args(Layout))}")
    return 2 if layout == "zigzag" else 1


def chunk_order(layout: Layout, size: int) -> list[int]:
    """Return the chunk numbers in rank order: the chunks of rank 0, of rank 1, ..."""
    if chunks_per_rank(layout) == 1:
        return list(range(size))
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


def split_sequence(x: Tensor, group: ProcessGroup | None, *, layout: Layout = "contiguous", dim: int = 0) -> Tensor:
    """Keep this rank's tokens of a tensor that all ranks hold: ids, positions, labels, hidden states.

    contiguous (for `ulysses_attention`): tokens [r T/n, (r+1) T/n). zigzag (for `ring_attention`): chunks r and
    2n-1-r of 2n, so that every rank has the same work under a causal mask. Segments can cross chunks.

    Forward: no communication. Backward: all-gather.

    Args:
        x: T tokens along `dim`.
        group: Context-parallel group; None: return x.
        layout: "contiguous" or "zigzag".
        dim: The dim of tokens.

    Returns:
        T/n tokens along `dim`.

    Raises:
        ValueError: T does not divide into equal chunks; pack with `multiple_of`.
    """
    if group is None or group.size() == 1:
        return x
    count = chunks_per_rank(layout) * group.size()
    if x.shape[dim] % count:
        raise ValueError(
            f"{x.shape[dim]} tokens do not divide into {count} equal chunks ({layout} layout, {group.size()} ranks); "
            f"pack with multiple_of={count}"
        )
    chunks = x.movedim(dim, 0).unflatten(0, (count, -1))
    order = torch.tensor(chunk_order(layout, group.size()), device=x.device)
    return scatter_to_sequence_parallel(chunks[order].flatten(0, 1), group).movedim(0, dim)


def gather_sequence(x: Tensor, group: ProcessGroup | None, *, layout: Layout = "contiguous", dim: int = 0) -> Tensor:
    """Gather the ranks' tokens on every rank: the inverse of `split_sequence`.

    Forward: all-gather. Backward: split; all ranks must continue with the same computation.

    Args:
        x: T/n tokens along `dim`.
        group: Context-parallel group; None: return x.
        layout: The layout of the split.
        dim: The dim of tokens.

    Returns:
        T tokens along `dim`.
    """
    if group is None or group.size() == 1:
        return x
    count = chunks_per_rank(layout) * group.size()
    whole = gather_from_sequence_parallel(x.movedim(dim, 0), group, reduce_gradient=False)
    order = torch.tensor(chunk_order(layout, group.size()), device=x.device)
    return whole.unflatten(0, (count, -1))[order.argsort()].flatten(0, 1).movedim(0, dim)
