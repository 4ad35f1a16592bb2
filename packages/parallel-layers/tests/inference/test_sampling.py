"""Draws of tokens against their distribution."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st

from parallel_layers.head import SamplingMask
from parallel_layers.inference import sample, sample_with_mask, truncate


def test_draws_follow_the_distribution_and_report_its_log_probs() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20000, 4)
    tokens, log_probs = sample(logits, torch.rand(20000, generator=torch.Generator().manual_seed(1)), temperature=0.7)
    expected = (logits[0] / 0.7).softmax(0)
    frequency = torch.bincount(tokens, minlength=4) / len(tokens)
    torch.testing.assert_close(frequency, expected, atol=0.015, rtol=0)
    torch.testing.assert_close(log_probs, expected.log()[tokens])


def test_log_probs_are_those_before_truncation_and_greedy_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    tokens, log_probs = sample(logits, torch.rand(1), top_k=1)
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[:, 1])
    greedy, greedy_log_probs = sample(logits, torch.rand(1), temperature=0.0)
    assert tokens.tolist() == greedy.tolist() == [1]
    torch.testing.assert_close(greedy_log_probs, log_probs)


def test_the_smallest_temperature_takes_the_largest_logit() -> None:
    tokens, log_probs = sample(torch.tensor([[-3e4, 3e4, 2e4]]), torch.rand(1), temperature=1e-30)
    assert tokens.tolist() == [1]
    assert log_probs.tolist() == [0]


def test_a_row_that_is_no_distribution_has_no_log_prob_and_leaves_the_others_alone() -> None:
    inf = torch.inf
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 1.0], [inf, 0.0], [-inf, -inf], [-inf, 2.0]])
    for options in ({}, {"top_k": 1}, {"top_p": 0.5}, {"temperature": 0.0}):
        _, log_probs = sample(logits, torch.rand(5), **options)
        assert log_probs.isnan().tolist() == [False, True, True, True, False]
        assert log_probs[4] == 0


def test_mistakes_are_refused() -> None:
    logits = torch.zeros(1, 3)
    mistakes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 lie in"),
        ({"min_p": 1.5}, "min_p=1.5 in"),
    )
    for options, message in mistakes:
        draws = (partial(draw, uniforms_N=torch.rand(1)) for draw in (sample, sample_with_mask))
        for function in (truncate, *draws):
            with pytest.raises(ValueError, match=message):
                function(logits, **options)
    for draw, temperature in ((sample, -1.0), (sample, torch.nan), (sample_with_mask, 0.0)):
        with pytest.raises(ValueError, match=f"temperature={temperature} must"):
            draw(logits, torch.rand(1), temperature=temperature)


def test_equal_numbers_draw_equal_tokens_at_the_ends_of_the_interval() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).expand(2, 4)
    tokens, _ = sample(logits, torch.tensor([0.0, 1 - 2.0**-24]))
    assert tokens.tolist() == [0, 3]
    assert sample(torch.zeros(8, 8), torch.arange(8) / 8)[0].tolist() == [*range(8)]  # at the borders of tokens


@given(
    st.integers(0, 1000), st.none() | st.integers(1, 12), st.floats(0.01, 1.0), st.floats(0.0, 1.0), st.floats(0.3, 2.0)
)
@example(0, 12, 1.0, 0.0, 1.0)
def test_a_sampling_mask_is_what_the_truncation_keeps(
    seed: int, top_k: int | None, top_p: float, min_p: float, temperature: float
) -> None:
    """The draws are those of `sample`, their log-probs those among the kept tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits, uniforms = torch.randn(5, 35, generator=generator), torch.rand(5, generator=generator)
    logits[0, 3:33], logits[1] = -torch.inf, torch.nan
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    tokens, log_probs, bits = sample_with_mask(logits, uniforms, **options)  # type: ignore[arg-type]
    expected, _ = sample(logits, uniforms, **options)  # type: ignore[arg-type]
    kept = truncate(logits / temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert (bits.shape, bits.dtype) == ((5, 8), torch.uint8)
    mask = SamplingMask.from_bits(bits).tolist()
    for row in (0, 2, 3, 4):
        ids = torch.nonzero(kept[row] > -torch.inf).flatten().tolist()
        assert mask[row] == ids
        assert tokens[row] == expected[row]
        torch.testing.assert_close(log_probs[row], kept[row].log_softmax(-1)[tokens[row]])
        probabilities = (logits[row] / temperature).softmax(-1)
        assert (probabilities[ids] >= min_p * probabilities.max() * (1 - 1e-5)).all()
    assert log_probs[1].isnan()


def test_a_sampling_mask_has_all_tokens_of_equal_logits() -> None:
    tokens, log_probs, bits = sample_with_mask(torch.zeros(50, 9), torch.rand(50), top_k=4)
    assert SamplingMask.from_bits(bits).tolist() == [list(range(9))] * 50
    assert len(tokens.unique()) > 4
    torch.testing.assert_close(log_probs, torch.full((50,), 1 / 9).log())
