"""Packed attention by `torch.nn.functional.scaled_dot_product_attention` on a padded batch.

Memory grows with segments x longest segment, so "auto" prefers the packed kernels. Any device and dtype; no host
synchronisation.

Shape legend: T tokens, Q query heads, K key-value heads, D head size, S segments, I = max_q, J = max_k.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.attention.kernel_interface import Scoring, Segments

_MAX_MASK = 1 << 26  # entries of a mask; more queries go in blocks


def _pad(x: Tensor, rows: Tensor, count: int, length: int) -> Tensor:
    """Pad packed `[T, heads, D]` to `[S, heads, length, D]` with zeros; the last row of the scatter is dropped."""
    spread = x.new_zeros(count * length + 1, *x.shape[1:]).index_copy(0, rows, x)
    return spread[:-1].unflatten(0, (count, length)).transpose(1, 2)


def _rows(boundaries: Tensor, tokens: int, length: int, used: Tensor | None) -> Tensor:
    """Return each token's row in the padded batch of S · length rows; row S · length for tokens outside segments."""
    index = torch.arange(tokens, device=boundaries.device)
    segment = torch.searchsorted(boundaries, index.to(boundaries.dtype), right=True) - 1
    count = boundaries.shape[0] - 1
    inside = segment.clamp(0, max(count - 1, 0))
    place = index - boundaries[inside]
    limit = used[inside] if used is not None else torch.full_like(place, length)
    real = (segment < count) & (place < limit) & (place < length)
    return torch.where(real, inside * length + place, count * length)


def sdpa_attention(q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor, segments: Segments, scoring: Scoring) -> Tensor:
    """Return the output `[T, Q, D]`, differentiable by autograd. There is no soft-cap and no log-sum-exp."""
    count = segments.cu_q.shape[0] - 1
    if count == 0 or q_TQD.shape[0] == 0:
        return q_TQD.new_zeros(*q_TQD.shape[:2], v_TKD.shape[2]) + 0 * (q_TQD.sum() + k_TKD.sum() + v_TKD.sum())
    size_q, size_k = max(segments.max_q, 1), max(segments.max_k, 1)
    fits = (segments.cu_q.diff().max() <= segments.max_q) & (segments.lengths_k.max() <= segments.max_k)
    torch._assert_async(fits, "a segment is longer than max_seqlen or max_seqlen_k")  # on CUDA without a wait
    rows_q = _rows(segments.cu_q, q_TQD.shape[0], size_q, None)
    rows_k = _rows(segments.cu_k, k_TKD.shape[0], size_k, segments.used_k)
    q = _pad(q_TQD, rows_q, count, size_q)
    k, v = (_pad(x, rows_k, count, size_k) for x in (k_TKD, v_TKD))

    if scoring.causal and scoring.window is None and segments.cu_q is segments.cu_k and segments.used_k is None:
        # Padding follows the last token, so the causal mask hides it from every real query.
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scoring.scale, enable_gqa=grouped)
    else:
        step = max(1, _MAX_MASK // (count * (q.shape[1] // k.shape[1]) * size_k))
        blocks = [_masked(block, k, v, i * step, segments, scoring) for i, block in enumerate(q.split(step, dim=2))]
        out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
    return F.pad(out.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1))[rows_q]


def _masked(q: Tensor, k: Tensor, v: Tensor, begin: int, segments: Segments, scoring: Scoring) -> Tensor:
    """Return the outputs `[S, Q, I, D']` of I queries from query `begin` of each segment on."""
    # The query heads of a key head become rows of one head, because torch would repeat the keys for every query head.
    visible, has_keys = _mask(segments, scoring, begin, q.shape[2], k.shape[2])
    group = q.shape[1] // k.shape[1]
    mask = visible[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    rows = q.unflatten(1, (-1, group)).flatten(2, 3)
    out = F.scaled_dot_product_attention(rows, k, v, mask, scale=scoring.scale)
    return out.unflatten(2, (group, -1)).flatten(1, 2).masked_fill(~has_keys, 0)


def _mask(segments: Segments, scoring: Scoring, begin: int, size_q: int, size_k: int) -> tuple[Tensor, Tensor]:
    """Return the mask `[S, 1, I, J]` and which queries have keys `[S, 1, I, 1]`.

    A query without keys sees all keys in the mask, because torch returns NaN for an empty row.
    """
    lengths_q, lengths_k = segments.cu_q.diff(), segments.lengths_k
    device = segments.cu_q.device
    pos_q = torch.arange(begin, begin + size_q, device=device, dtype=torch.int32) + (lengths_k - lengths_q)[:, None]
    pos_k = torch.arange(size_k, device=device, dtype=torch.int32)
    visible = (pos_k < lengths_k[:, None])[:, None] & scoring.sees(pos_q[:, :, None] - pos_k)
    has_keys = visible.any(-1, keepdim=True)
    return (visible | ~has_keys)[:, None], has_keys[:, None]
