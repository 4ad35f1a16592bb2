"""Sliding-window attention in the zigzag layout: each chunk fetches the chunks before it within the window.

A window of w tokens reaches h = ceil((w - 1) / C) chunks back. Only these chunks are sent, straight to the ranks that
need them. The fetched chunks and the chunk itself are consecutive keys that end with the queries, so every backend and
every option of `packed_attention` works.

Shape legend: T' = T/n tokens of this rank, C = T'/2 tokens of a chunk, n ranks, Q query heads, K key-value heads,
D head size, D' size of a value head, S segments.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention.context_parallel.sequence_layout import boundaries_in, chunks_of
from parallel_layers.attention.packed import AttentionOptions, packed_attention
from parallel_layers.distributed.collectives import all_to_all


def halo_attention(
    q_TQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    group: ProcessGroup,
    window: int,
    options: AttentionOptions,
) -> Tensor:
    """Causal `packed_attention` within `window` tokens, `[T', Q, D']`; arguments as in `ring_attention`.

    Forward: one all-to-all of chunks `[C, K, D + D']`. Backward: one all-to-all of their gradients.
    """
    chunk = q_TQD.shape[0] // 2
    reach = -(-(window - 1) // chunk)
    held = _fetch(torch.cat((k_TKD, v_TKD), dim=-1), reach, group)
    keys: list[Tensor] = []
    bounds_q, bounds_k = [], []
    for i, last in enumerate(chunks_of(group.rank(), group.size())):
        numbers = range(max(0, last - reach), last + 1)
        # An empty segment separates the segments of the two chunks.
        bounds_q.append(boundaries_in(cu_seqlens, last * chunk, chunk) + i * chunk)
        bounds_k.append(boundaries_in(cu_seqlens, numbers[0] * chunk, len(numbers) * chunk) + len(keys) * chunk)
        keys += [held[number] for number in numbers]
    k, v = torch.cat(keys).split([q_TQD.shape[2], v_TKD.shape[2]], dim=-1)
    within: AttentionOptions = {
        **options,
        "cu_seqlens_k": torch.cat(bounds_k),
        "max_seqlen_k": min(max_seqlen, (reach + 1) * chunk),
    }
    return packed_attention(q_TQD, k, v, torch.cat(bounds_q), min(max_seqlen, chunk), **within)


def _fetch(x: Tensor, reach: int, group: ProcessGroup) -> dict[int, Tensor]:
    """Return this rank's chunks and the `reach` chunks before each, `[C, ...]`, by their numbers in the pack."""
    rank, size, chunk = group.rank(), group.size(), x.shape[0] // 2
    own = dict(zip(chunks_of(rank, size), x.chunk(2), strict=True))
    needs = [_missing(other, size, reach) for other in range(size)]
    if not any(needs):
        return own
    sent = [[number for number in needs[other] if number in own] for other in range(size)]
    arriving = [[number for number in needs[rank] if number in chunks_of(other, size)] for other in range(size)]
    going, coming = ([chunk * len(numbers) for numbers in side] for side in (sent, arriving))
    message = torch.cat([x[:0], *(own[number] for numbers in sent for number in numbers)])
    arrived = all_to_all(message, group, input_sizes=going, output_sizes=coming)
    order = [number for numbers in arriving for number in numbers]
    return own | {number: arrived[i * chunk : (i + 1) * chunk] for i, number in enumerate(order)}


def _missing(rank: int, size: int, reach: int) -> list[int]:
    """Return the chunks within a rank's windows that the rank does not hold."""
    own = chunks_of(rank, size)
    return sorted({number for last in own for number in range(max(0, last - reach), last)} - set(own))
