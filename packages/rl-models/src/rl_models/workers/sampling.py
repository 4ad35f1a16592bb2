"""Draws of tokens from logits: temperature, top-k, top-p. N sequences, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_models.numbers import require_number

# Logits up to 3e8 divided by this temperature are finite in fp32.
MIN_TEMPERATURE = 1e-30


def check_sampling(*, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> None:
    """Check the options of a draw.

    Raises:
        ValueError: The temperature is negative, not finite, or above 0 and too small to divide by; top_k is below 1,
            or top_p outside (0, 1].
    """
    require_number("temperature", temperature)
    require_number("top_p", top_p)
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must not be negative")
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"temperature={temperature} is too small to divide logits by; use 0, which takes the most likely token, or "
            f"at least {MIN_TEMPERATURE}"
        )
    if top_k is not None:
        require_number("top_k", top_k, integer=True)
        if top_k < 1:
            raise ValueError(f"top_k={top_k} must be at least 1; None keeps all tokens")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must lie in (0, 1]")


def truncate(logits_NV: Tensor, *, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Return the logits with -inf for tokens that may not be drawn.

    top-k keeps the k most likely tokens (Fan et al. 2018, arXiv:1805.04833); top-p the smallest set of most likely
    tokens whose probability reaches p (Holtzman et al. 2020, arXiv:1904.09751), always at least one. Top-k comes first.

    Raises:
        ValueError: top_k is below 1, or top_p outside (0, 1].
    """
    check_sampling(top_k=top_k, top_p=top_p)
    if top_k is not None and top_k < logits_NV.shape[-1]:
        kept = logits_NV.topk(top_k, dim=-1)
        logits_NV = torch.full_like(logits_NV, -torch.inf).scatter(-1, kept.indices, kept.values)
    if top_p < 1:
        ordered, order = logits_NV.sort(dim=-1, descending=True, stable=True)
        probability = ordered.softmax(dim=-1)
        # A token stays if the tokens before it have not reached p.
        beyond = probability.cumsum(dim=-1) - probability >= top_p
        logits_NV = logits_NV.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    return logits_NV


def sample(
    logits_NV: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Args:
        logits_NV: `[N, V]` fp32.
        temperature: Divide the logits by this number, at least `MIN_TEMPERATURE`; 0 takes the most likely token.
        top_k, top_p: See `truncate`.
        generator: Ranks with equal logits and equally seeded generators draw the same tokens.

    Returns:
        Tokens `[N]` int64, and their log-probs `[N]` fp32 at this temperature (at 1 for temperature 0), before the
        truncation, as a training step computes them. A row with NaN or +inf, or of -inf alone, gets an arbitrary token
        with the log-prob NaN; a check here would stall the device at every token.

    Raises:
        ValueError: `check_sampling` refuses an option.
    """
    check_sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    log_probs_NV = (logits_NV / (temperature or 1.0)).log_softmax(dim=-1)
    if temperature == 0:
        tokens = logits_NV.argmax(dim=-1)
    else:
        # A row with NaN or +inf is NaN throughout; torch would fail for all rows, on a GPU by a device assertion.
        probabilities = truncate(log_probs_NV, top_k=top_k, top_p=top_p).softmax(dim=-1).nan_to_num_(nan=1.0)
        tokens = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return tokens, log_probs_NV.gather(-1, tokens[:, None])[:, 0]
