"""The kernels that draw tokens, against the cumulative distribution in fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from parallel_layers.inference import truncate
from parallel_layers.inference.truncation import _search, _sorted_weights, _weights_above, least_logits
from parallel_layers.inference.vocabulary_parallel import packed_bits
from parallel_layers.kernels import sample as kernels
from parallel_layers.kernels.sample import (
    bits_of_kept,
    draw_from_share,
    draw_tokens,
    row_statistics,
    top_p_threshold,
)


@pytest.mark.parametrize("vocab_size", [51, 5000])
def test_draws_follow_the_cumulative_distribution(device: torch.device, vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(40, vocab_size, device=device)
    logits[3, 10:], logits[:, -1] = -torch.inf, -torch.inf
    uniforms = torch.rand(40, device=device)
    uniforms[:2] = torch.tensor([0.0, 1 - 2.0**-24])
    tokens, log_probs = draw_tokens(logits, torch.stack([uniforms] * 2, 1)[:, 0], 0.7)
    expected = (logits / 0.7).double().log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), expected.gather(1, tokens[:, None])[:, 0], rtol=0, atol=5e-6)
    passed = expected.exp().cumsum(-1).gather(1, tokens[:, None])[:, 0]
    assert (uniforms <= passed + 2e-6).all()
    assert (uniforms >= passed - log_probs.double().exp() - 2e-6).all()


def test_numbers_at_borders_draw_tokens_with_weight(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks begin and end with tokens that cannot be drawn, and sums of fp32 round differently at each place."""
    monkeypatch.setattr(kernels, "_BLOCK", 32)
    torch.manual_seed(0)
    blocks = torch.randn(16, 32, device=device)
    blocks[:, :8], blocks[:, -8:] = -torch.inf, -torch.inf
    borders = blocks.double().exp().sum(1).cumsum(0)
    uniforms = ((borders / borders[-1])[:, None] + torch.arange(-1, 2, device=device) * 2.0**-25).float().flatten()
    logits, uniforms = blocks.flatten().repeat(len(uniforms), 1), uniforms.clamp(0, 1 - 2.0**-24)
    tokens, log_probs = draw_tokens(logits, uniforms, 1.0)
    assert (log_probs > -torch.inf).all()
    assert ((tokens % 32 >= 8) & (tokens % 32 < 24)).all()


def test_a_number_at_a_border_draws_the_token_behind_it(device: torch.device) -> None:
    """Equal weights, whose sums are exact."""
    uniforms = torch.arange(8, device=device) / 8
    tokens, _ = draw_tokens(torch.zeros(8, 8, device=device), uniforms, 1.0)
    assert tokens.tolist() == [*range(8)]


def test_the_largest_number_draws_a_token_with_weight(device: torch.device) -> None:
    """The sum of a whole block can be above the last of its cumulative sums."""
    logits = torch.randn(40, 2048, generator=torch.Generator().manual_seed(0)).to(device)
    logits[:, -8:] = -torch.inf
    _, log_probs = draw_tokens(logits, torch.full((40,), 1 - 2.0**-24, device=device), 1.0)
    assert (log_probs > -torch.inf).all()


def test_broken_rows_have_no_log_prob(device: torch.device) -> None:
    logits = torch.randn(4, 300, device=device)
    logits[0, 5], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    for options in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}):
        least = least_logits(logits, **options)
        tokens, log_probs = draw_tokens(logits, torch.rand(4, device=device), 1.0, least)
    assert log_probs.isnan().tolist() == [True, True, True, False]
    assert ((tokens >= 0) & (tokens < 300)).all()


@pytest.mark.parametrize(
    "options",
    [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.9}, {"top_k": 9999}, {"min_p": 0.05, "top_p": 0.9}],
    ids=str,
)
def test_truncated_draws(device: torch.device, options: dict[str, Any]) -> None:
    """Drawn from the tokens that `truncate` keeps, in proportion; the log-probs are those before the truncation."""
    torch.manual_seed(0)
    draws = 200 if device.type == "cuda" else 4  # the interpreter is slow
    logits = (3 * torch.randn(3, 700, device=device)).repeat_interleave(draws, 0)
    uniforms = (torch.arange(draws, device=device) / draws).repeat(3)
    least = least_logits(logits, temperature=0.9, **options)
    tokens, log_probs = draw_tokens(logits, uniforms, 0.9, least)
    whole = (logits / 0.9).double().log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), whole.gather(1, tokens[:, None])[:, 0], rtol=0, atol=5e-6)
    kept = truncate(whole, **options).softmax(-1)
    same_tokens, renormalised = draw_tokens(logits, uniforms, 0.9, least, among_kept=True)
    assert torch.equal(same_tokens, tokens)
    torch.testing.assert_close(renormalised.double(), kept.log().gather(1, tokens[:, None])[:, 0], rtol=0, atol=5e-6)
    for offset, words in ((0, 22), (29, 23)):
        bits = bits_of_kept(logits, least, offset, words)
        assert torch.equal(bits, packed_bits(kept > 0, offset, words))
    passed = kept.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    own = kept.gather(1, tokens[:, None])[:, 0]
    assert (own > 0).all()
    assert (uniforms <= passed + 2e-6).all()
    assert (uniforms >= passed - own - 2e-6).all()


@pytest.mark.parametrize("vocab_size", [5, 256, 700])
@pytest.mark.parametrize("top_p", [1e-300, 0.6, 0.999])
def test_the_threshold_of_top_p(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, vocab_size: int, top_p: float
) -> None:
    """As the search over sorted weights finds it. Two programs have the three blocks of a row."""
    monkeypatch.setattr(kernels, "_PROGRAMS", 8)
    torch.manual_seed(4)
    logits = torch.tensor([3.0, 1e-3, 3.0, 3.0], device=device)[:, None] * torch.randn(4, vocab_size, device=device)
    logits[2, 1:], logits[:, 3] = -torch.inf, -torch.inf
    highest, least = logits.amax(-1), logits.amax(-1) - 9
    threshold = top_p_threshold(logits, highest, least, 0.7, top_p, torch.clone)
    measure = partial(_weights_above, *_sorted_weights(logits, highest, least, 0.7))
    low = torch.full_like(threshold, torch.iinfo(torch.int32).min)
    assert torch.equal(threshold, _search(measure, low, top_p, torch.clone))
    totals: list[torch.Tensor] = []
    top_p_threshold(logits, highest, least, 0.7, top_p, lambda sums: totals.append(sums) or sums)
    # Two ranks with parts of the vocabulary, one after the other.
    rest = [total.clone() for total in totals]
    for part in logits.tensor_split(2, 1):
        rounds = iter(zip(totals, rest, strict=True))

        def add(sums: torch.Tensor) -> torch.Tensor:
            total, left = next(rounds)  # noqa: B023
            left -= sums
            return total

        assert torch.equal(top_p_threshold(part.contiguous(), highest, least, 0.7, top_p, add), threshold)
    assert not any(left.any() for left in rest)


def test_a_top_p_that_fp32_rounds_to_one_leaves_out_what_it_should(device: torch.device) -> None:
    logits = torch.tensor([[0.0, -23.5, -25.0]], device=device)  # probabilities 1, 6e-11 and 1.4e-11
    kept = [least_logits(logits, top_p=1 - rest).item() for rest in (1e-9, 4e-11, 4e-12)]
    assert kept == [0.0, -23.5, -25.0]


@pytest.mark.parametrize("vocab_size", [5, 2048, 5000])
def test_a_share_that_is_all_draws_the_same(device: torch.device, vocab_size: int) -> None:
    torch.manual_seed(3)
    logits, uniforms = 2 * torch.randn(40, vocab_size, device=device), torch.rand(40, device=device)
    logits[::3, vocab_size // 2 :] = -torch.inf
    expected = draw_tokens(logits, uniforms, 0.7)
    stats, highest, total = row_statistics(logits, 0.7)
    torch.testing.assert_close(highest + total.log(), (logits / 0.7).logsumexp(-1))
    tokens, log_probs = draw_from_share(logits, stats, uniforms, highest + total.log(), 0.7)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(log_probs, expected[1])
    # The part of another rank is twice as likely: every log-prob is lower.
    _, lower = draw_from_share(logits, stats, uniforms, highest + (3 * total).log(), 0.7)
    torch.testing.assert_close(lower, log_probs - torch.tensor(3.0).log())
    empty = torch.full((2, vocab_size), -torch.inf, device=device)
    assert row_statistics(empty, 1.0)[2].tolist() == [0, 0]
