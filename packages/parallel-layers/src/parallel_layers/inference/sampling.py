"""Draws of tokens from logits: temperature, top-k, top-p. N sequences, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.kernels.runtime import use_triton
from parallel_layers.kernels.sample import draw_tokens


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


def _most_likely(logits_NV: Tensor, top_k: int | None, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the largest logits in descending order, -inf for logits that `truncate` drops, and their tokens."""
    if top_k is not None and top_k < logits_NV.shape[-1]:
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
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row, by the inverse of the cumulative distribution.

    Args:
        logits_NV: `[N, V]` fp32, or fp64 of an fp64 model.
        uniforms_N: `[N]` fp32, uniform in [0, 1); equal logits and numbers give equal tokens on the same device.
        temperature: Divide the logits by this number, at least 1e-30 in fp32; 0 takes the most likely token.
        top_k, top_p: See `truncate`. On a GPU, tokens that tie with the last kept token are kept, too.

    Returns:
        Tokens `[N]` int64, and their log-probs `[N]` fp32 at this temperature (at 1 for temperature 0), before the
        truncation. A row with NaN or +inf, or with only -inf, gets an arbitrary token with the log-prob NaN.

    Raises:
        ValueError: `truncate` refuses an option.
    """
    check_truncation(top_k, top_p)
    truncated = top_k is not None or top_p < 1
    if temperature and use_triton(logits_NV):
        return draw_tokens(logits_NV.float().contiguous(), uniforms_N, temperature, top_k, top_p)
    log_probs_NV = (logits_NV / (temperature or 1.0)).log_softmax(dim=-1)
    if temperature == 0:
        tokens = logits_NV.argmax(dim=-1)
    else:
        weights = truncate(log_probs_NV, top_k=top_k, top_p=top_p).exp() if truncated else log_probs_NV.exp()
        tokens = _drawn(weights, uniforms_N)[:, 0]
    return tokens, log_probs_NV.gather(-1, tokens[:, None])[:, 0].float()


def sample_with_mask(
    logits_NV: Tensor, uniforms_N: Tensor, *, temperature: float = 1.0, top_k: int, top_p: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw as `sample` does, and return the sampling mask: the tokens that top-k and top-p have kept.

    Training renormalises its probabilities over the mask (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). K is `top_k`,
    which bounds the mask. On a GPU torch's top-k finds the kept tokens, which is slower than the kernels of `sample`.

    Returns:
        Tokens `[N]` int64; their log-probs `[N]` fp32 among the kept tokens, NaN as for `sample`; and the kept tokens
        `[N, K]` int32 in ascending order, then -1. Tokens as likely as the last kept token may be dropped.
    """
    check_truncation(top_k, top_p)
    vocab_size = logits_NV.shape[-1]
    ordered, order = _most_likely(logits_NV / temperature, top_k, top_p)
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
    column = torch.searchsorted(passed, uniforms_N.double()[:, None] * passed[:, -1:], right=True)
    # A broken row finds no place.
    return column.clamp(max=weights.shape[-1] - 1)
