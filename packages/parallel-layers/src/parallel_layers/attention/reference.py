"""The reference attention, which defines the results of all kernels, and its exact form.

The reference uses batched fp32 GEMMs. Segments of similar length are padded to a common length and computed as one
batch; a few short segments are one batch whatever their lengths. Long segments are computed in blocks of queries that
skip masked keys. The exact form has exact GEMMs and a fixed order of sums: the bits of a segment and head do not depend
on the batch.

Shape legend: T tokens, Q query heads, K key-value heads, G = Q/K, D head size, D' size of a value head, N segments of a
batch, I queries, J keys.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.attention.kernel_interface import Kernel, Scoring, Segments
from parallel_layers.kernels.exact import exact_product, in_double
from parallel_layers.module.autocast import wide

_MAX_SCORES = 1 << 24  # numbers in one block of scores: 64 MiB in fp32
_MAX_EXACT_SCORES = 1 << 22  # 32 MiB in fp64
# Padding up to so many scores costs less than the operations of a further batch.
_CHEAP_SCORES = 1 << 16


class _Batch(NamedTuple):
    """Segments computed together, padded to I queries `[N, I]` and J keys `[N, J]` each."""

    rows_q: Tensor  # row of each query in the packed tensor; 0 for padding
    rows_k: Tensor
    real_q: Tensor  # False for padding
    real_k: Tensor
    place_q: Tensor  # place of each query among the keys of its segment
    shifts: list[int]  # n_k - n_q of each segment, on the host


def _padded(length: int) -> int:
    """Return the padded length of a segment: a power of two up to 64, then a multiple of 64."""
    return 1 << (length - 1).bit_length() if 0 < length <= 64 else -(-length // 64) * 64


def _batches(segments: Segments, num_heads: int) -> Iterator[_Batch]:
    """Group the segments that have queries by their padded lengths, or all of them where padding is cheap."""
    device = segments.cu_q.device
    with_queries = [segment for segment in segments.on_host() if segment[1]]
    if not with_queries:
        return
    longest = max(segment[1] for segment in with_queries), max(segment[3] for segment in with_queries)
    cheap = len(with_queries) * num_heads * longest[0] * longest[1] <= _CHEAP_SCORES
    groups: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for segment in with_queries:
        size = longest if cheap else (_padded(segment[1]), _padded(segment[3]))
        groups.setdefault(size, []).append(segment)
    for (size_q, size_k), members in groups.items():
        batch_size = max(1, _MAX_SCORES // max(1, num_heads * size_q * size_k))
        for begin in range(0, len(members), batch_size):
            rows = torch.tensor(members[begin : begin + batch_size], device=device)
            start_q, length_q, start_k, length_k = rows[:, :, None].unbind(1)
            index_q, index_k = torch.arange(size_q, device=device), torch.arange(size_k, device=device)
            real_q, real_k = index_q < length_q, index_k < length_k
            shift = length_k - length_q
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
    picked = x.index_select(0, rows.flatten()).unflatten(0, rows.shape).to(dtype)  # faster on CPUs than x[rows]
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
        key_begin, key_end = 0, size_k
        if scoring.causal:
            key_end = max(0, min(size_k, rows.stop + max(batch.shifts)))
        if scoring.window is not None:
            key_begin = max(0, min(key_end, rows.start + min(batch.shifts) - scoring.window + 1))
        keys = slice(key_begin, key_end)
        distance = batch.place_q[:, rows, None] - torch.arange(key_begin, key_end, device=batch.rows_q.device)
        visible = batch.real_q[:, rows, None] & batch.real_k[:, None, keys] & scoring.sees(distance)
        yield rows, keys, visible[:, None, None]


def _scores(q: Tensor, k: Tensor, visible: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
    """Return scores `[N, K, G, I, J]`, -inf where masked, and the derivative of the soft-cap (None without cap)."""
    scores = q @ k.transpose(-1, -2)[:, :, None] * scoring.scale
    slope = None
    if scoring.softcap is not None:
        bounded = torch.tanh(scores / scoring.softcap)
        scores, slope = bounded * scoring.softcap, 1 - bounded.square()
    return scores.masked_fill(~visible, float("-inf")), slope


def _forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    kv_heads, size_v = v.shape[1:]
    dtype = wide(q.dtype)
    out = q.new_zeros(tokens, heads, size_v)
    lse = q.new_full((heads, tokens), float("-inf"), dtype=dtype)
    for batch in _batches(segments, heads):
        q_batch = _gather(q, batch.rows_q, batch.real_q, dtype).unflatten(1, (kv_heads, -1))
        k_batch, v_batch = (_gather(x, batch.rows_k, batch.real_k, dtype) for x in (k, v))
        for rows, keys, visible in _blocks(batch, heads, scoring):
            scores, _ = _scores(q_batch[..., rows, :], k_batch[:, :, keys], visible, scoring)
            total = torch.logsumexp(scores, dim=-1, keepdim=True)
            # For a query without keys: exp(-inf - 0) = 0.
            weights = torch.exp(scores - total.masked_fill(total == float("-inf"), 0))
            block_out = weights @ v_batch[:, :, None, keys]
            real = batch.real_q[:, rows]
            token_rows = batch.rows_q[:, rows][real]
            out[token_rows] = block_out.permute(0, 3, 1, 2, 4).flatten(2, 3)[real].to(out.dtype)
            lse[:, token_rows] = total[..., 0].permute(0, 3, 1, 2).flatten(2, 3)[real].T
    return out, lse


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute, with p = exp(s - lse) and do = d_out:

    dv = pᵀ do,   ds = p (do vᵀ - sum(out · do)),   dq = ds k,   dk = dsᵀ q
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    dtype = wide(q.dtype)
    d_q, d_k, d_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta_T = (d_out.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    # exp(-inf - inf) = 0 for a query without keys.
    lse_T = lse.masked_fill(lse == float("-inf"), float("inf")).T[..., None]
    for batch in _batches(segments, heads):
        q_batch, d_o, delta, total = (
            _gather(x, batch.rows_q, batch.real_q, dtype).unflatten(1, (kv_heads, -1))
            for x in (q, d_out, delta_T, lse_T)
        )
        k_batch, v_batch = (_gather(x, batch.rows_k, batch.real_k, dtype) for x in (k, v))
        d_q_batch, d_k_batch, d_v_batch = (torch.zeros_like(x) for x in (q_batch, k_batch, v_batch))
        for rows, keys, visible in _blocks(batch, heads, scoring):
            scores, slope = _scores(q_batch[..., rows, :], k_batch[:, :, keys], visible, scoring)
            weights = torch.exp(scores - total[..., rows, :])
            d_weights = d_o[..., rows, :] @ v_batch[:, :, None, keys].transpose(-1, -2)
            d_scores = weights * (d_weights - delta[..., rows, :]) * scoring.scale
            if slope is not None:
                d_scores = d_scores * slope
            d_q_batch[..., rows, :] = d_scores @ k_batch[:, :, None, keys]
            # Query heads of a key head are consecutive, so one GEMM sums over them.
            d_k_batch[:, :, keys] += d_scores.flatten(2, 3).transpose(-1, -2) @ q_batch[..., rows, :].flatten(2, 3)
            d_v_batch[:, :, keys] += weights.flatten(2, 3).transpose(-1, -2) @ d_o[..., rows, :].flatten(2, 3)
        d_q[batch.rows_q[batch.real_q]] = d_q_batch.flatten(1, 2).transpose(1, 2)[batch.real_q].to(d_q.dtype)
        rows_k = batch.rows_k[batch.real_k]
        d_k[rows_k] = d_k_batch.transpose(1, 2)[batch.real_k].to(d_k.dtype)
        d_v[rows_k] = d_v_batch.transpose(1, 2)[batch.real_k].to(d_v.dtype)
    return d_q, d_k, d_v


def _exact_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Compute one segment at a time; reads the boundaries on the host."""
    tokens, heads, _ = q.shape
    kv_heads, size_v = v.shape[1:]
    out = q.new_zeros(tokens, heads, size_v)
    lse = q.new_full((heads, tokens), float("-inf"), dtype=torch.float32)
    for start, length, start_k, length_k in segments.on_host():
        if not length or not length_k:
            continue
        keys = slice(start_k, start_k + length_k)
        key, value = k[keys].permute(1, 0, 2), v[keys].permute(1, 2, 0)  # [K, J, D], [K, D', J]
        # GEMMs are exact and rows independent, so the cut of the queries changes no bit.
        step = max(1, _MAX_EXACT_SCORES // (heads * length_k))
        for begin in range(0, length, step):
            end = min(begin + step, length)
            rows = slice(start + begin, start + end)
            query = q[rows].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [K, G I, D]
            positions = torch.arange(begin, end, device=q.device) + length_k - length
            block_out, total = _attend(query, key, value, positions.repeat(heads // kv_heads), scoring)
            out[rows] = block_out.unflatten(1, (-1, end - begin)).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
            lse[:, rows] = total.view(heads, end - begin)
    return out, lse


def _attend(query: Tensor, key: Tensor, value: Tensor, places: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return output `[K, G I, D']` and log-sum-exp `[K, G I]` for queries at `places [G I]` among the keys."""
    scores = exact_product(query, key) * scoring.scale
    if scoring.softcap is not None:
        scores = in_double(torch.tanh, scores / scoring.softcap) * scoring.softcap
    distance = places[:, None] - torch.arange(key.shape[1], device=key.device)
    scores = scores.masked_fill(~scoring.sees(distance), float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True)
    weights = in_double(torch.exp, scores - largest.masked_fill(largest == float("-inf"), 0.0))
    total = weights.sum(-1, keepdim=True, dtype=torch.float64).float()
    silent = total == 0  # a query without keys
    out = exact_product(weights, value) / total.masked_fill(silent, 1.0)
    lse = (largest + in_double(torch.log, total.masked_fill(silent, 1.0))).squeeze(-1)
    return out, lse


REFERENCE = Kernel(_forward, _backward)
EXACT = Kernel(_exact_forward, _backward)
