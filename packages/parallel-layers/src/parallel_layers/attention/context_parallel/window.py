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
    rank, size, chunk = group.rank(), group.size(), q_TQD.shape[0] // 2
    reach = -(-(window - 1) // chunk) if chunk else 0
    head_dim = q_TQD.shape[2]
    held = _fetch(torch.cat((k_TKD, v_TKD), dim=-1), reach, group)
    keys, bounds_q, bounds_k, longest = [], [], [], 0
    for i, last in enumerate((rank, 2 * size - 1 - rank)):
        first = max(0, last - reach)
        keys += [held[c] for c in range(first, last + 1)]
        start, stop = last * chunk, (last + 1) * chunk
        bounds_q.append(cu_seqlens.clamp(start, stop) - start + i * chunk)
        bounds_k.append(cu_seqlens.clamp(first * chunk, stop) - first * chunk + longest)
        longest += stop - first * chunk
    k, v = torch.cat(keys).split([head_dim, v_TKD.shape[2]], dim=-1)
    # An empty segment separates the segments of the two chunks.
    within: AttentionOptions = {
        **options,
        "window": window,
        "cu_seqlens_k": torch.cat(bounds_k),
        "max_seqlen_k": min(max_seqlen, (reach + 1) * chunk),
    }
    return packed_attention(q_TQD, k, v, torch.cat(bounds_q), min(max_seqlen, chunk), **within)


def _fetch(x: Tensor, reach: int, group: ProcessGroup) -> dict[int, Tensor]:
    """Return this rank's chunks and the `reach` chunks before each, `[C, ...]`, by their numbers in the pack."""
    rank, size = group.rank(), group.size()
    needs = [_missing(other, size, reach) for other in range(size)]
    own = dict(zip(_chunks_of(rank, size), x.chunk(2), strict=True))
    sent = [[c for c in needs[other] if c in own] for other in range(size)]
    arriving = [[c for c in needs[rank] if c in _chunks_of(other, size)] for other in range(size)]
    if not any(needs):
        return own
    chunk = x.shape[0] // 2
    message = torch.cat([x[:0], *(own[c] for chunks in sent for c in chunks)])
    going, coming = ([chunk * len(chunks) for chunks in side] for side in (sent, arriving))
    arrived = all_to_all(message, group, input_sizes=going, output_sizes=coming)
    order = [c for chunks in arriving for c in chunks]
    return own | {c: arrived[i * chunk : (i + 1) * chunk] for i, c in enumerate(order)}


def _chunks_of(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank


def _missing(rank: int, size: int, reach: int) -> list[int]:
    """Return the chunks within a rank's windows that the rank does not hold."""
    own = _chunks_of(rank, size)
    return sorted({c for last in own for c in range(max(0, last - reach), last)} - set(own))
