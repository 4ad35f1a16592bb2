"""The distribution of a pack's tokens over the context-parallel group.

Shape legend: T tokens of the whole pack, n ranks, r this rank, S segments.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed.collectives import gather_from_sequence_parallel, scatter_to_sequence_parallel
from parallel_layers.model.options import ContextParallel

Layout = Literal["contiguous", "zigzag"]


def layout_of(context_parallel: ContextParallel) -> Layout:
    """Return the layout of the tokens for a form of context parallelism."""
    return "zigzag" if context_parallel == "ring" else "contiguous"


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of the two chunks that a rank holds in the zigzag layout of 2 · `size` chunks."""
    return rank, 2 * size - 1 - rank


def boundaries_in(cu_seqlens: Tensor, start: int, tokens: int) -> Tensor:
    """Return the boundaries `[S+1]` of the segments' parts in the `tokens` tokens from `start` on."""
    return (cu_seqlens - start).clamp(0, tokens)


def chunk_order(layout: Layout, size: int) -> list[int]:
    """Return the numbers of the chunks of the pack in rank order; raise ValueError for an unknown layout."""
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r} is unknown; use one of {', '.join(get_args(Layout))}")
    if layout == "contiguous":
        return list(range(size))
    return [number for rank in range(size) for number in chunks_of(rank, size)]


def split_sequence(x: Tensor, group: ProcessGroup | None, *, layout: Layout = "contiguous") -> Tensor:
    """Keep this rank's tokens of a tensor that all ranks hold: ids, positions, labels, hidden states.

    Forward: no communication. Backward: all-gather.

    Args:
        x: `[T, ...]`.
        group: Context-parallel group; None: return x.
        layout: "contiguous" (for `ulysses_attention`): tokens [r T/n, (r+1) T/n). "zigzag" (for `ring_attention`):
            chunks r and 2n-1-r of 2n, so that every rank has the same work under a causal mask.

    Returns:
        `[T/n, ...]`.

    Raises:
        ValueError: T does not divide into equal chunks; pack with `multiple_of`.
    """
    if group is None or group.size() == 1:
        return x
    order = chunk_order(layout, group.size())
    if len(x) % len(order):
        raise ValueError(
            f"{len(x)} tokens do not divide into {len(order)} equal chunks ({layout} layout, {group.size()} "
            f"ranks); pack with multiple_of={len(order)}"
        )
    chunks = x.unflatten(0, (len(order), -1))[torch.tensor(order, device=x.device)]
    return scatter_to_sequence_parallel(chunks.flatten(0, 1), group)


def gather_sequence(x: Tensor, group: ProcessGroup | None, *, layout: Layout = "contiguous") -> Tensor:
    """Gather the ranks' tokens `[T/n, ...]` on every rank to `[T, ...]`: the inverse of `split_sequence`.

    Forward: all-gather. Backward: split; all ranks must continue with the same computation.
    """
    if group is None or group.size() == 1:
        return x
    order = torch.tensor(chunk_order(layout, group.size()), device=x.device)
    gathered = gather_from_sequence_parallel(x, group, reduce_gradient=False)
    return gathered.unflatten(0, (len(order), -1))[order.argsort()].flatten(0, 1)
