"""Truncations of the distributions that tokens are drawn from: min-p, top-k, top-p.

Each keeps the tokens whose logit is at least a threshold. Ranks that hold parts of the vocabulary find the threshold of
the whole vocabulary without gathering it. For top-p they search it bit by bit: a float's bits, read as an integer, have
the order of the floats, and each round tries a few thresholds. The probability above a threshold is a sum of integers,
which is exact in any order. So the kept tokens do not depend on how the vocabulary is divided.

Shape legend: N rows, V vocabulary, or this rank's part of it, W thresholds of a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed import async_collectives
from parallel_layers.kernels.runtime import use_triton
from parallel_layers.kernels.sample import WEIGHT_BITS, top_p_threshold

# The bits of the threshold that a round of `_search` finds.
_BITS = 4
# Integers of the width of each dtype.
_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}


def check_truncation(top_k: int | None, top_p: float, min_p: float) -> None:
    """Raise ValueError when top_k is below 1, top_p outside (0, 1], or min_p outside [0, 1]."""
    if (top_k is not None and top_k < 1) or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(
            f"top_k={top_k} must be at least 1 (None keeps all tokens), top_p={top_p} lie in (0, 1], and min_p={min_p} "
            "in [0, 1]"
        )


def truncate(logits_NV: Tensor, *, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Return the logits with -inf for tokens that may not be drawn.

    min-p keeps the tokens whose probability is at least `min_p` times the largest (Nguyen et al. 2024,
    arXiv:2407.01082); then top-k the k most likely tokens (Fan et al. 2018, arXiv:1805.04833); then top-p the smallest
    set of most likely tokens whose probability among these reaches p (Holtzman et al. 2020, arXiv:1904.09751), always
    at least one. This is the order of vLLM. Tokens as likely as the last kept token are kept, too.

    Raises:
        ValueError: top_k is below 1, top_p outside (0, 1], or min_p outside [0, 1].
    """
    check_truncation(top_k, top_p, min_p)
    compared_NV = wide_logits(logits_NV.detach())
    least_N = least_logits(compared_NV, top_k=top_k, top_p=top_p, min_p=min_p)
    return logits_NV.masked_fill(compared_NV < least_N[:, None], -torch.inf)


def wide_logits(logits_NV: Tensor) -> Tensor:
    """Return contiguous logits in fp32, or fp64 for fp64: the kernels and the search read their bits."""
    return (logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()).contiguous()


def least_logits(
    logits_NV: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return the smallest logit `[N]` that may be drawn at a temperature; see `truncate`.

    Rows with NaN or +inf have any number.

    Args:
        logits_NV: `[N, V]` of `wide_logits`, not divided by the temperature.
        group: The ranks that hold equal parts of the vocabulary. Communication: for min-p and top-p an all-reduce
            `[N]`; for top-k an all-gather `[N, min(top_k, V)]`; for top-p 8 all-reduces of `[N, 16]` int64 (16 of them
            for fp64), by Triton 8 of `[N, 4]` and 4 of `[N, 16]`.
    """
    ranks = group if async_collectives.is_sharded(group) else None
    least_N = logits_NV.new_full(logits_NV.shape[:1], -math.inf)
    if min_p or top_p < 1:
        highest_N = logits_NV.amax(-1)
        if ranks is not None:
            highest_N = async_collectives.all_reduce(highest_N, ranks, "max")
        least_N = highest_N + (temperature * math.log(min_p) if min_p else -math.inf)
    if top_k is not None:
        candidates = logits_NV.topk(min(top_k, logits_NV.shape[1]), dim=-1).values
        if ranks is not None:
            candidates = async_collectives.all_gather(candidates, ranks, -1)
            candidates = candidates.topk(min(top_k, candidates.shape[1]), dim=-1).values
        least_N = torch.maximum(least_N, candidates[:, -1])
    if top_p == 1:
        return least_N
    add = partial(async_collectives.all_reduce, group=ranks) if ranks is not None else _unchanged
    if use_triton(logits_NV):
        low_N = top_p_threshold(logits_NV, highest_N, least_N, temperature, top_p, add)
    else:
        measure = partial(_weights_above, *_sorted_weights(logits_NV, highest_N, least_N, temperature))
        smallest = torch.iinfo(_KEYS[logits_NV.dtype]).min
        low_N = _search(measure, torch.full_like(highest_N, smallest, dtype=_KEYS[logits_NV.dtype]), top_p, add)
    return _ordered(low_N).view(logits_NV.dtype)


def _unchanged(weights_NW: Tensor) -> Tensor:
    return weights_NW


def _search(
    measure: Callable[[Tensor, int], Tensor], low_N: Tensor, top_p: float, add: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return for each row the largest threshold whose tokens have at least `top_p` of the weight of all tokens.

    Args:
        measure: Returns `[N, W]` int64, the weight of this rank's tokens from `low + (w << shift)` on.
        low_N: The smallest integer of its dtype.
        add: Adds these weights over the ranks.
    """
    target_N1 = None
    for shift in range(8 * low_N.element_size() - _BITS, -1, -_BITS):
        weights_NW = add(measure(low_N, shift))
        if target_N1 is None:
            target_N1 = (top_p * weights_NW[:, :1].double()).ceil().long()
        # The lowest threshold of a round has enough weight by the round before.
        low_N = low_N + ((weights_NW[:, 1:] >= target_N1).sum(1) << shift).to(low_N.dtype)
    return low_N


def _ordered(bits: Tensor) -> Tensor:
    """Return integers in the order of the floats with these bits; the function is its own inverse."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)


def _sorted_weights(logits_NV: Tensor, highest_N: Tensor, least_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the logits as integers in ascending order, and the weight of the tokens from each one on, `[N, V + 1]`.

    The weights are those of `kernels.sample.top_p_threshold`.
    """
    keys = _ordered(logits_NV.view(_KEYS[logits_NV.dtype])).sort(dim=-1).values
    logits_NV = _ordered(keys).view(logits_NV.dtype)
    weights = ((logits_NV - highest_N[:, None]) / temperature).exp() * 2**WEIGHT_BITS
    weights = weights.masked_fill(logits_NV < least_N[:, None], 0).long()
    return keys, F.pad(weights.flip(1).cumsum(1).flip(1), (0, 1))


def _weights_above(keys_NV: Tensor, above_NV: Tensor, low_N: Tensor, shift: int) -> Tensor:
    """Return the weight of the tokens from each threshold on; see `_search`."""
    steps = torch.arange(1 << _BITS, dtype=low_N.dtype, device=low_N.device) << shift
    return above_NV.gather(1, torch.searchsorted(keys_NV, low_N[:, None] + steps))
