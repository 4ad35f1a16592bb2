"""Attention with exact GEMMs and a fixed order of sums: the bits of a segment and head do not depend on the batch.

Shape legend: T tokens, Q query heads, K key-value heads, G = Q/K, D head size, D' size of a value head, I queries and
J keys of a segment.
"""

import torch
from torch import Tensor

from parallel_layers.attention.kernel_interface import Kernel, Scoring, Segments
from parallel_layers.attention.reference import REFERENCE
from parallel_layers.kernels.exact import exact_product, in_double

_MAX_SCORES = 1 << 22  # numbers in one block of scores: 32 MiB in fp64


def _forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
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
        step = max(1, _MAX_SCORES // (heads * length_k))
        for first in range(0, length, step):
            last = min(first + step, length)
            rows = slice(start + first, start + last)
            query = q[rows].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [K, G I, D]
            places = torch.arange(first, last, device=q.device) + length_k - length
            part, total = _attend(query, key, value, places.repeat(heads // kv_heads), scoring)
            out[rows] = part.unflatten(1, (-1, last - first)).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
            lse[:, rows] = total.view(heads, last - first)
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


EXACT = Kernel(_forward, REFERENCE.backward)
