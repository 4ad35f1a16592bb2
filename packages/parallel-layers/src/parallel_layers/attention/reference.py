"""The reference attention: batched fp32 GEMMs per segment. It defines the results of all kernels.

Segments of similar length are padded to a common length and computed as one batch. Long segments are computed in blocks
of queries that skip masked keys.

Shape legend: T tokens, Q query heads, K key-value heads, G = Q/K, D head size, N segments of a batch,
I queries, J keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from parallel_layers.attention.kernel_interface import Forward, Scoring, Segments

_MAX_SCORES = 1 << 24  # numbers in one block of scores: 64 MiB in fp32


@dataclass(frozen=True)
class _Batch:
    """Segments computed together, padded to I queries and J keys each.

    Attributes:
        rows_q: Row of each query in the packed tensor, `[N, I]`; 0 for padding.
        rows_k: Row of each key, `[N, J]`; 0 for padding.
        real_q: `[N, I]`, False for padding.
        real_k: `[N, J]`, False for padding.
        place_q: Place of each query among the keys of its segment, `[N, I]`.
        shifts: n_k - n_q of each segment, on the host.
    """

    rows_q: Tensor
    rows_k: Tensor
    real_q: Tensor
    real_k: Tensor
    place_q: Tensor
    shifts: list[int]


def _padded(length: int) -> int:
    """Return the padded length of a segment: a power of two up to 64, then a multiple of 64."""
    return 1 << (length - 1).bit_length() if 0 < length <= 64 else -(-length // 64) * 64


def _batches(segments: Segments, num_heads: int) -> Iterator[_Batch]:
    """Group the segments that have queries by their padded lengths."""
    device = segments.cu_q.device
    bounds_q, bounds_k = segments.cu_q.tolist(), segments.cu_k.tolist()
    lengths_k = [end - start for start, end in pairwise(bounds_k)]
    if segments.used_k is not None:
        lengths_k = segments.used_k.tolist()
    groups: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for (start_q, end_q), (start_k, _), length_k in zip(pairwise(bounds_q), pairwise(bounds_k), lengths_k, strict=True):
        if end_q > start_q:
            key = (_padded(end_q - start_q), _padded(length_k))
            groups.setdefault(key, []).append((start_q, end_q - start_q, start_k, length_k))
    for (size_q, size_k), members in groups.items():
        together = max(1, _MAX_SCORES // max(1, num_heads * size_q * size_k))
        for first in range(0, len(members), together):
            part = torch.tensor(members[first : first + together], device=device)
            start_q, length_q, start_k, length_k_ = part[:, :, None].unbind(1)
            index_q, index_k = torch.arange(size_q, device=device), torch.arange(size_k, device=device)
            real_q, real_k = index_q < length_q, index_k < length_k_
            shift = length_k_ - length_q
            yield _Batch(
                rows_q=torch.where(real_q, start_q + index_q, 0),
                rows_k=torch.where(real_k, start_k + index_k, 0),
                real_q=real_q,
                real_k=real_k,
                place_q=index_q + shift,
                shifts=shift.flatten().tolist(),
            )


def _gather(x: Tensor, rows: Tensor, real: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather `[T, heads, D]` to `[N, heads, length, D]`; padding is 0, so no NaN of another segment enters."""
    picked = x[rows].to(dtype)
    return picked.masked_fill_(~real[..., None, None], 0).transpose(1, 2)


def _blocks(batch: _Batch, num_heads: int, scoring: Scoring) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield blocks of queries, the range of their keys, and the mask `[N, 1, 1, I, J]` of visible keys."""
    count, size_q = batch.rows_q.shape
    size_k = batch.rows_k.shape[1]
    step = max(16, min(size_q, _MAX_SCORES // max(1, count * num_heads * size_k)))
    if size_q > 128:  # causal blocks of 128 skip about half of the FLOPs
        step = min(step, 128)
    for start in range(0, size_q, step):
        rows = slice(start, min(start + step, size_q))
        first, last = 0, size_k
        if scoring.causal:
            last = max(0, min(size_k, rows.stop + max(batch.shifts)))
        if scoring.window is not None:
            first = max(0, min(last, rows.start + min(batch.shifts) - scoring.window + 1))
        keys = slice(first, last)
        distance = batch.place_q[:, rows, None] - torch.arange(first, last, device=batch.rows_q.device)
        seen = batch.real_q[:, rows, None] & batch.real_k[:, None, keys]
        if scoring.causal:
            seen &= distance >= 0
        if scoring.window is not None:
            seen &= (distance if scoring.causal else distance.abs()) < scoring.window
        yield rows, keys, seen[:, None, None]


def _scores(q: Tensor, k: Tensor, seen: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
    """Return scores `[N, K, G, I, J]`, -inf where masked, and the derivative of the soft-cap (None without cap)."""
    scores = q @ k.transpose(-1, -2)[:, :, None] * scoring.scale
    slope = None
    if scoring.softcap is not None:
        bounded = torch.tanh(scores / scoring.softcap)
        scores, slope = bounded * scoring.softcap, 1 - bounded.square()
    return scores.masked_fill(~seen, float("-inf")), slope


class ReferenceKernel:
    """The reference attention as a `Kernel`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        tokens, heads, _ = q.shape
        kv_heads, size_v = v.shape[1:]
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(tokens, heads, size_v)
        lse = q.new_full((heads, tokens), float("-inf"), dtype=wide)
        for batch in _batches(segments, heads):
            q_batch = _gather(q, batch.rows_q, batch.real_q, wide).unflatten(1, (kv_heads, -1))
            k_batch, v_batch = (_gather(x, batch.rows_k, batch.real_k, wide) for x in (k, v))
            for rows, keys, seen in _blocks(batch, heads, scoring):
                scores, _ = _scores(q_batch[..., rows, :], k_batch[:, :, keys], seen, scoring)
                total = torch.logsumexp(scores, dim=-1, keepdim=True)
                # For a query without keys: exp(-inf - 0) = 0.
                weights = torch.exp(scores - total.masked_fill(total == float("-inf"), 0))
                part = weights @ v_batch[:, :, None, keys]
                real = batch.real_q[:, rows]
                places = batch.rows_q[:, rows][real]
                out[places] = part.permute(0, 3, 1, 2, 4).flatten(2, 3)[real].to(out.dtype)
                lse[:, places] = total[..., 0].permute(0, 3, 1, 2).flatten(2, 3)[real].T
        return out, lse

    def backward(
        self, d_out: Tensor, done: Forward, segments: Segments, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`. With p = exp(s - lse) and do = d_out:

        dv = pᵀ do,   ds = p (do vᵀ - sum(out · do)),   dq = ds k,   dk = dsᵀ q
        """
        heads, kv_heads = done.q.shape[1], done.k.shape[1]
        wide = torch.promote_types(done.q.dtype, torch.float32)
        d_q, d_k, d_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (done.q, done.k, done.v))
        delta_T = (d_out.to(wide) * done.out.to(wide)).sum(-1, keepdim=True)
        # exp(-inf - inf) = 0 for a query without keys.
        lse_T = done.lse.masked_fill(done.lse == float("-inf"), float("inf")).T[..., None]
        for batch in _batches(segments, heads):
            on_q = (
                _gather(x, batch.rows_q, batch.real_q, wide).unflatten(1, (kv_heads, -1))
                for x in (done.q, d_out, delta_T, lse_T)
            )
            q, d_o, delta, total = on_q
            k, v = (_gather(x, batch.rows_k, batch.real_k, wide) for x in (done.k, done.v))
            d_q_batch, d_k_batch, d_v_batch = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
            for rows, keys, seen in _blocks(batch, heads, scoring):
                scores, slope = _scores(q[..., rows, :], k[:, :, keys], seen, scoring)
                weights = torch.exp(scores - total[..., rows, :])
                d_weights = d_o[..., rows, :] @ v[:, :, None, keys].transpose(-1, -2)
                d_scores = weights * (d_weights - delta[..., rows, :]) * scoring.scale
                if slope is not None:
                    d_scores = d_scores * slope
                d_q_batch[..., rows, :] = d_scores @ k[:, :, None, keys]
                # Query heads of a key head are consecutive, so one GEMM sums over them.
                d_k_batch[:, :, keys] += d_scores.flatten(2, 3).transpose(-1, -2) @ q[..., rows, :].flatten(2, 3)
                d_v_batch[:, :, keys] += weights.flatten(2, 3).transpose(-1, -2) @ d_o[..., rows, :].flatten(2, 3)
            d_q[batch.rows_q[batch.real_q]] = d_q_batch.flatten(1, 2).transpose(1, 2)[batch.real_q].to(d_q.dtype)
            rows_k = batch.rows_k[batch.real_k]
            d_k[rows_k] = d_k_batch.transpose(1, 2)[batch.real_k].to(d_k.dtype)
            d_v[rows_k] = d_v_batch.transpose(1, 2)[batch.real_k].to(d_v.dtype)
        return d_q, d_k, d_v
