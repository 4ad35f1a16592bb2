"""Draws of tokens from logits: temperature, top-k, top-p.

Shape legend: N sequences, V vocabulary, or this rank's part of a vocabulary that a group divides, K tokens of a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed import async_collectives
from parallel_layers.inference.vocabulary_parallel import from_owner, most_likely, share_of, statistics
from parallel_layers.kernels.runtime import use_triton
from parallel_layers.kernels.sample import draw_from_share, draw_tokens, row_statistics


def check_truncation(top_k: int | None, top_p: float) -> None:
    """Raise ValueError when top_k is below 1, or top_p outside (0, 1]."""
    if (top_k is not None and top_k < 1) or not 0 < top_p <= 1:
        raise ValueError(f"top_k={top_k} must be at least 1 (None keeps all tokens), and top_p={top_p} lie in (0, 1]")


def truncate(logits_NV: Tensor, *, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Return the logits with -inf for tokens that may not be drawn.

    top-k keeps the k most likely tokens (Fan et al. 2018, arXiv:1805.04833); top-p the smallest set of most likely
    tokens whose probability reaches p (Holtzman et al. 2020, arXiv:1904.09751), always at least one. Top-k comes first.

    Raises:
        ValueError: top_k is below 1, or top_p outside (0, 1].
    """
    check_truncation(top_k, top_p)
    ordered, order = _most_likely(logits_NV, top_k, top_p)
    return torch.full_like(logits_NV, -torch.inf).scatter(-1, order, ordered)


def _most_likely(
    logits_NV: Tensor, top_k: int | None, top_p: float, group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Return the largest logits in descending order, -inf for logits that `truncate` drops, and their tokens."""
    if group is not None:
        assert top_k is not None  # the logits have been gathered
        ordered, order = most_likely(logits_NV, top_k, group)
    elif top_k is not None and top_k < logits_NV.shape[-1]:
        ordered, order = logits_NV.topk(top_k, dim=-1)
    else:
        ordered, order = logits_NV.sort(dim=-1, descending=True, stable=True)
    if top_p < 1:
        probability = ordered.softmax(dim=-1)
        # A token stays if the tokens before it have not reached p.
        ordered = ordered.masked_fill(probability.cumsum(dim=-1) - probability >= top_p, -torch.inf)
    return ordered, order


def sample(
    logits_NV: Tensor,
    uniforms_N: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row, by the inverse of the cumulative distribution.

    Args:
        logits_NV: `[N, V]` fp32, or fp64 of an fp64 model.
        uniforms_N: `[N]` fp32, uniform in [0, 1); equal logits and numbers give equal tokens on the same device.
        temperature: Divide the logits by this number, at least 1e-30 in fp32; 0 takes the most likely token.
        top_k, top_p: See `truncate`. On a GPU, tokens that tie with the last kept token are kept, too, on one rank.
        group: The ranks that hold equal parts of the vocabulary, in its order, with -inf for padding. All ranks get the
            same bits. Communication: exchanges `[N, 2]` and with top-k `[N, top_k]`; top-p alone gathers the logits.

    Returns:
        Tokens `[N]` int64, and their log-probs `[N]` fp32 at this temperature (at 1 for temperature 0), before the
        truncation. A row with NaN or +inf, or with only -inf, gets an arbitrary token with the log-prob NaN.

    Raises:
        ValueError: `truncate` refuses an option.
    """
    check_truncation(top_k, top_p)
    truncated = top_k is not None or top_p < 1
    if async_collectives.is_sharded(group):
        if temperature and top_p < 1 and top_k is None:  # a search for the threshold would take more exchanges
            logits_NV, group = async_collectives.all_gather(logits_NV, group, -1), None
        else:
            return _sample_parts(logits_NV, uniforms_N, group, temperature, top_k, top_p)
    if temperature and use_triton(logits_NV):
        return draw_tokens(logits_NV.float().contiguous(), uniforms_N, temperature, top_k, top_p)
    log_probs_NV = (logits_NV / (temperature or 1.0)).log_softmax(dim=-1)
    if temperature == 0:
        tokens = logits_NV.argmax(dim=-1)
    else:
        weights = truncate(log_probs_NV, top_k=top_k, top_p=top_p).exp() if truncated else log_probs_NV.exp()
        tokens = _drawn(weights, uniforms_N)[:, 0]
    return tokens, log_probs_NV.gather(-1, tokens[:, None])[:, 0].float()


def _sample_parts(
    logits_NV: Tensor,
    uniforms_N: Tensor,
    group: ProcessGroup,
    temperature: float,
    top_k: int | None,
    top_p: float,
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
    ordered, order = _most_likely(scaled_NV, top_k if temperature else 1, top_p if temperature else 1.0, group)
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
    top_k: int,
    top_p: float = 1.0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw as `sample` does, and return the sampling mask: the tokens that top-k and top-p have kept.

    Training renormalises its probabilities over the mask (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). K is `top_k`,
    which bounds the mask. On a GPU torch's top-k finds the kept tokens, which is slower than the kernels of `sample`.

    Returns:
        Tokens `[N]` int64; their log-probs `[N]` fp32 among the kept tokens, NaN as for `sample`; and the kept tokens
        `[N, K]` int32 in ascending order, then -1. Tokens as likely as the last kept token may be dropped.
    """
    check_truncation(top_k, top_p)
    group = group if async_collectives.is_sharded(group) else None
    vocab_size = logits_NV.shape[-1] * (1 if group is None else group.size())
    ordered, order = _most_likely(logits_NV / temperature, top_k, top_p, group)
    ids, column_order = order.masked_fill(ordered == -torch.inf, vocab_size).sort(dim=-1)
    log_probs = ordered.gather(-1, column_order).log_softmax(dim=-1)
    column = _drawn(log_probs.exp(), uniforms_N)
    tokens = ids.gather(-1, column).clamp(max=vocab_size - 1)
    mask = F.pad(ids.masked_fill(ids == vocab_size, -1).int(), (0, top_k - ids.shape[-1]), value=-1)
    return tokens[:, 0], log_probs.gather(-1, column)[:, 0].float(), mask


def _drawn(weights: Tensor, uniforms_N: Tensor) -> Tensor:
    """Return the column `[N, 1]` of each row of weights in which its cumulative sum passes the row's number."""
    # In fp64, so that a rare token keeps its probability in a large vocabulary.
    passed = weights.double().cumsum(dim=-1)
    return _passed(passed, uniforms_N.double()[:, None] * passed[:, -1:])


def _passed(passed: Tensor, target: Tensor) -> Tensor:
    """Return the first column `[N, 1]` of each row of cumulative sums that is above the target `[N, 1]`."""
    # A broken row finds no place.
    return torch.searchsorted(passed, target, right=True).clamp(max=passed.shape[-1] - 1)
