"""Draws of tokens from logits: temperature, min-p, top-k, top-p.

Shape legend: N sequences, V vocabulary, or this rank's part of a vocabulary that a group divides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed import async_collectives
from parallel_layers.inference.vocabulary_parallel import from_owner, most_likely, share_of, statistics
from parallel_layers.kernels.runtime import use_triton
from parallel_layers.kernels.sample import draw_from_share, draw_tokens, row_statistics


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
    least = logits_NV.amax(dim=-1, keepdim=True) + (math.log(min_p) if min_p else -math.inf)
    if top_k is not None and top_k < logits_NV.shape[-1]:
        least = torch.maximum(least, logits_NV.topk(top_k, dim=-1).values[..., -1:])
    if top_p < 1:
        ordered = logits_NV.masked_fill(logits_NV < least, -torch.inf).sort(dim=-1, descending=True).values
        probability = ordered.softmax(dim=-1)
        # A token stays if the tokens before it have not reached p.
        last = (probability.cumsum(dim=-1) - probability < top_p).sum(dim=-1, keepdim=True) - 1
        least = ordered.gather(-1, last.clamp(min=0))
    return logits_NV.masked_fill(logits_NV < least, -torch.inf)


def sample(
    logits_NV: Tensor,
    uniforms_N: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row, by the inverse of the cumulative distribution.

    Args:
        logits_NV: `[N, V]` fp32, or fp64 of an fp64 model.
        uniforms_N: `[N]` fp32, uniform in [0, 1); equal logits and numbers give equal tokens on the same device.
        temperature: Divide the logits by this number, at least 1e-30 in fp32; 0 takes the most likely token.
        top_k, top_p, min_p: See `truncate`. Ranks of a group with top-k drop tokens that tie with the k-th.
        group: The ranks that hold equal parts of the vocabulary, in its order, with -inf for padding. All ranks get the
            same bits. Communication: exchanges `[N, 2]` and with top-k `[N, top_k]`; top-p and min-p without top-k
            gather the logits.

    Returns:
        Tokens `[N]` int64, and their log-probs `[N]` fp32 at this temperature (at 1 for temperature 0), before the
        truncation. A row with NaN or +inf, or with only -inf, gets an arbitrary token with the log-prob NaN.

    Raises:
        ValueError: `truncate` refuses an option.
    """
    check_truncation(top_k, top_p, min_p)
    truncated = top_k is not None or top_p < 1 or min_p > 0
    if async_collectives.is_sharded(group):
        if temperature and truncated and top_k is None:  # a search for the threshold would take more exchanges
            logits_NV, group = async_collectives.all_gather(logits_NV, group, -1), None
        else:
            return _sample_parts(logits_NV, uniforms_N, group, temperature, top_k, top_p, min_p)
    if temperature and use_triton(logits_NV):
        return draw_tokens(logits_NV.float().contiguous(), uniforms_N, temperature, top_k, top_p, min_p)[:2]
    log_probs_NV = (logits_NV / (temperature or 1.0)).log_softmax(dim=-1)
    if temperature == 0:
        tokens = logits_NV.argmax(dim=-1)
    else:
        weights = (
            truncate(log_probs_NV, top_k=top_k, top_p=top_p, min_p=min_p).exp() if truncated else log_probs_NV.exp()
        )
        tokens = _drawn(weights, uniforms_N)[:, 0]
    return tokens, log_probs_NV.gather(-1, tokens[:, None])[:, 0].float()


def _sample_parts(
    logits_NV: Tensor,
    uniforms_N: Tensor,
    group: ProcessGroup,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
) -> tuple[Tensor, Tensor]:
    """Draw from this rank's part of the vocabulary and the other ranks' parts; see `sample`."""
    part = logits_NV.shape[1]
    if temperature and top_k is None and use_triton(logits_NV):
        logits_NV = logits_NV.float().contiguous()
        stats, highest, total = row_statistics(logits_NV, temperature)
        share = share_of(highest, total, uniforms_N, group)
        drawn = draw_from_share(logits_NV, stats, share.target, share.normalizer, temperature)
        return from_owner(share, *drawn, group, part)
    scaled_NV = logits_NV / (temperature or 1.0)
    share = share_of(*statistics(scaled_NV), uniforms_N, group)
    if temperature and top_k is None:
        weights = (scaled_NV - scaled_NV.amax(-1, keepdim=True)).exp()
        column = _passed(weights.double().cumsum(-1), share.target.double()[:, None])
        log_prob = scaled_NV.gather(-1, column)[:, 0] - share.normalizer
        return from_owner(share, column[:, 0], log_prob, group, part)
    ordered, order = most_likely(scaled_NV, top_k if temperature and top_k else 1, group)
    ordered = truncate(ordered, top_p=top_p, min_p=min_p)
    # In the order of the vocabulary, as on one rank.
    ids, places = order.sort(dim=-1)
    kept = ordered.gather(-1, places)
    column = _drawn((kept - ordered[:, :1]).exp(), uniforms_N)
    log_prob = kept.gather(-1, column)[:, 0] - share.normalizer
    return ids.gather(-1, column)[:, 0], log_prob.float()


def sample_with_mask(
    logits_NV: Tensor,
    uniforms_N: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw as `sample` does, and return the tokens that the truncation has kept, as bits.

    Training renormalises its probabilities over these tokens (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). A group
    gathers the logits.

    Returns:
        Tokens `[N]` int64; their log-probs `[N]` fp32 among the kept tokens, NaN as for `sample`; and bits `[N, B]`
        uint8, B = 4 ceil(V / 32), of which `head.SamplingMask.from_bits` makes a mask.
    """
    check_truncation(top_k, top_p, min_p)
    if async_collectives.is_sharded(group):
        logits_NV = async_collectives.all_gather(logits_NV, group, -1)
    if use_triton(logits_NV):
        return draw_tokens(logits_NV.float().contiguous(), uniforms_N, temperature, top_k, top_p, min_p, with_mask=True)
    kept = truncate(logits_NV / temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    log_probs = kept.log_softmax(dim=-1)
    tokens = _drawn(log_probs.exp(), uniforms_N)
    bits = F.pad(kept > -torch.inf, (0, -kept.shape[-1] % 32)).unflatten(-1, (-1, 8)).to(torch.uint8)
    bits = (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=-1, dtype=torch.uint8)
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0].float(), bits


def _drawn(weights: Tensor, uniforms_N: Tensor) -> Tensor:
    """Return the column `[N, 1]` of each row of weights in which its cumulative sum passes the row's number."""
    # In fp64, so that a rare token keeps its probability in a large vocabulary.
    passed = weights.double().cumsum(dim=-1)
    return _passed(passed, uniforms_N.double()[:, None] * passed[:, -1:])


def _passed(passed: Tensor, target: Tensor) -> Tensor:
    """Return the first column `[N, 1]` of each row of cumulative sums that is above the target `[N, 1]`."""
    # A broken row finds no place.
    return torch.searchsorted(passed, target, right=True).clamp(max=passed.shape[-1] - 1)
