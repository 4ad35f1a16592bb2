"""Advantages without a critic, against the definitions in plain Python."""

import statistics

import pytest
import torch
from hypothesis import example, given, strategies as st

from rl_models.losses import discounted_returns, grpo_advantages, overlong_penalty, rloo_advantages

scored = st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(0, 3)), min_size=1, max_size=12)


@given(scored, st.booleans())
def test_grpo_equals_the_definition(rows: list[tuple[float, int]], scale: bool) -> None:
    scores, groups = (torch.tensor(column) for column in zip(*rows, strict=True))
    actual = grpo_advantages(scores, groups * 7, scale=scale)
    for i, (score, group) in enumerate(rows):
        members = [other for other, of in rows if of == group]
        expected = score - statistics.fmean(members)
        if scale:
            expected /= (statistics.stdev(members) if len(members) > 1 else 0.0) + 1e-6
        assert actual[i].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@given(scored)
def test_rloo_equals_the_definition(rows: list[tuple[float, int]]) -> None:
    rows = rows + rows  # at least two of each group
    scores, groups = (torch.tensor(column) for column in zip(*rows, strict=True))
    actual = rloo_advantages(scores, groups)
    for i, (score, group) in enumerate(rows):
        others = [other for j, (other, of) in enumerate(rows) if of == group and j != i]
        assert actual[i].item() == pytest.approx(score - statistics.fmean(others), rel=1e-5, abs=1e-5)


@given(st.floats(-5, 5), st.integers(2, 40))
@example(0.1, 3)
def test_equal_scores_have_no_advantage(score: float, size: int) -> None:
    """Rounding would leave tiny advantages, which an optimizer scales up where all groups have equal scores."""
    scores, groups = torch.full((size,), score, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)
    for advantages in (grpo_advantages(scores, groups), rloo_advantages(scores, groups)):
        assert advantages.tolist() == [0.0] * size


def test_discounted_returns_skip_what_is_no_action() -> None:
    rewards = torch.tensor([9.0, 1.0, 9.0, 2.0, 9.0, 4.0])
    mask = torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.bool)
    returns = discounted_returns(rewards, mask, [4, 2], gamma=0.5)
    torch.testing.assert_close(returns, torch.tensor([0.0, 2.0, 0.0, 2.0, 0.0, 4.0]))


def test_overlong_penalty() -> None:
    penalty = overlong_penalty(torch.tensor([1, 60, 80, 90, 100, 200]), max_length=100, buffer=20)
    torch.testing.assert_close(penalty, torch.tensor([0.0, 0.0, 0.0, -0.5, -1.0, -1.0]))


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sequences \[1\] are the only ones of their groups"):
        rloo_advantages(torch.ones(3), torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match=r"must both be \[N\]"):
        grpo_advantages(torch.ones(3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="buffer=0 must be above 0"):
        overlong_penalty(torch.ones(1), max_length=5, buffer=0)
