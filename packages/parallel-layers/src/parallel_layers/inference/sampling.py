"""Draws of tokens from logits: temperature, min-p, top-k, top-p.

Shape legend: N sequences, V vocabulary, or this rank's part of a vocabulary that a group divides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.inference.truncation import check_truncation, least_logits, wide_logits
from parallel_layers.inference.vocabulary_parallel import from_owner, joined_bits, packed_bits, share_of, statistics
from parallel_layers.kernels.runtime import use_triton
from parallel_layers.kernels.sample import bits_of_kept, draw_from_share, draw_tokens, row_statistics


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
        logits_NV: `[N, V]`; the draws are computed in fp32, or in fp64 for fp64 logits.
        uniforms_N: `[N]` fp32, uniform in [0, 1); equal logits and numbers give equal tokens on the same device.
        temperature: Divide the logits by this number, at least 1e-30 in fp32; 0 takes the most likely token.
        top_k, top_p, min_p: See `truncate`.
        group: The ranks that hold equal parts of the vocabulary, in its order, with -inf for padding. All ranks get the
            same bits. Communication: see `least_logits` where tokens are left out, `share_of` and `from_owner`.

    Returns:
        Tokens `[N]` int64, and their log-probs `[N]` fp32 at this temperature (at 1 for temperature 0), before the
        truncation. A row with NaN or +inf, or with only -inf, gets an arbitrary token with the log-prob NaN.

    Raises:
        ValueError: `truncate` refuses an option, or the temperature is negative.
    """
    check_truncation(top_k, top_p, min_p)
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must not be negative; 0 takes the most likely token")
    logits_NV, least_N = wide_logits(logits_NV), None
    if temperature and (top_k is not None or top_p < 1 or min_p > 0):
        limits: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        least_N = least_logits(logits_NV, temperature=temperature, **limits, group=group)
    if async_collectives.is_sharded(group):
        return _draw_from_parts(logits_NV, uniforms_N, temperature, least_N, group)
    if temperature and use_triton(logits_NV):
        return draw_tokens(logits_NV, uniforms_N, temperature, least_N)
    log_probs_NV = (logits_NV / (temperature or 1.0)).log_softmax(dim=-1)
    if temperature == 0:
        tokens = logits_NV.argmax(dim=-1)
    else:
        tokens = _drawn(_kept(log_probs_NV, logits_NV, least_N).exp(), uniforms_N)[:, 0]
    return tokens, log_probs_NV.gather(-1, tokens[:, None])[:, 0].float()


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
    gathers the bits, V / 8 bytes a row.

    Returns:
        Tokens `[N]` int64; their log-probs `[N]` fp32 among the kept tokens, NaN as for `sample`; and bits `[N, B]`
        uint8, B = 4 ceil(V / 32), of which `head.SamplingMask.from_bits` makes a mask.

    Raises:
        ValueError: `truncate` refuses an option, or the temperature is not positive.
    """
    check_truncation(top_k, top_p, min_p)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive for a draw with a mask; `sample` takes 0, too")
    logits_NV, part = wide_logits(logits_NV), logits_NV.shape[1]
    limits: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    least_N = least_logits(logits_NV, temperature=temperature, **limits, group=group)
    with_triton = use_triton(logits_NV)

    def bits_of(offset: int, words: int) -> Tensor:
        if with_triton:
            return bits_of_kept(logits_NV, least_N, offset, words)
        return packed_bits((logits_NV >= least_N[:, None]) & (logits_NV > -torch.inf), offset, words)

    if async_collectives.is_sharded(group):
        tokens, log_probs = _draw_from_parts(logits_NV, uniforms_N, temperature, least_N, group, among_kept=True)
        return tokens, log_probs, joined_bits(bits_of, group, part).view(torch.uint8)
    bits = bits_of(0, -(-part // 32)).view(torch.uint8)
    if with_triton:
        return *draw_tokens(logits_NV, uniforms_N, temperature, least_N, among_kept=True), bits
    log_probs_NV = _kept(logits_NV / temperature, logits_NV, least_N).log_softmax(dim=-1)
    tokens = _drawn(log_probs_NV.exp(), uniforms_N)
    return tokens[:, 0], log_probs_NV.gather(-1, tokens)[:, 0].float(), bits


def _draw_from_parts(
    logits_NV: Tensor,
    uniforms_N: Tensor,
    temperature: float,
    least_N: Tensor | None,
    group: ProcessGroup,
    among_kept: bool = False,
) -> tuple[Tensor, Tensor]:
    """Draw from this rank's part of the vocabulary and the other ranks' parts, tokens with at least the logit `least`.

    The log-probs are those before the truncation, or with `among_kept` those among the kept tokens.
    """
    part = logits_NV.shape[1]
    if temperature and use_triton(logits_NV):
        stats, highest, total = row_statistics(logits_NV, temperature)
        kept = total
        if least_N is not None:
            stats, _, kept = row_statistics(logits_NV, temperature, least_N)
        share = share_of(highest, kept if among_kept else total, kept, uniforms_N, group)
        drawn = draw_from_share(logits_NV, stats, share.uniform, share.normalizer, temperature, least_N)
        return from_owner(share, *drawn, group, part)
    scaled_NV = logits_NV / (temperature or 1.0)
    highest, total = statistics(scaled_NV)
    if temperature == 0:
        share = share_of(highest, total, total, None, group)
        return from_owner(share, scaled_NV.argmax(-1), highest - share.normalizer, group, part)
    weights = (_kept(scaled_NV, logits_NV, least_N) - highest[:, None]).exp()
    kept = total if least_N is None else torch.where(highest == -torch.inf, 0, weights.sum(-1))
    share = share_of(highest, kept if among_kept else total, kept, uniforms_N, group)
    column = _drawn(weights, share.uniform)
    log_prob = scaled_NV.gather(-1, column)[:, 0] - share.normalizer
    return from_owner(share, column[:, 0], log_prob, group, part)


def _kept(values_NV: Tensor, logits_NV: Tensor, least_N: Tensor | None) -> Tensor:
    """Return the values with -inf for tokens below a logit."""
    return values_NV if least_N is None else values_NV.masked_fill(logits_NV < least_N[:, None], -torch.inf)


def _drawn(weights: Tensor, uniforms_N: Tensor) -> Tensor:
    """Return the column `[N, 1]` of each row of weights in which its cumulative sum passes the row's number."""
    # In fp64, so that a rare token keeps its probability in a large vocabulary.
    passed = weights.double().cumsum(dim=-1)
    columns = torch.searchsorted(passed, uniforms_N.double()[:, None] * passed[:, -1:], right=True)
    return columns.clamp(max=passed.shape[-1] - 1)  # a broken row finds no place
