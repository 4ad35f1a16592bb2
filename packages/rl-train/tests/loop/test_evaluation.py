"""The metrics of an evaluation: pass@k against all choices of k responses, maj@k by hand, and their options."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from rl_train.loop.evaluation import best_of, majority
from rl_train.options.derived import cache_options, check
from rl_train.options.options import TrainOptions


@given(st.data(), st.integers(1, 3), st.integers(1, 6))
def test_the_best_of_k_is_the_mean_over_all_choices(data: st.DataObject, prompts: int, n: int) -> None:
    scores = torch.tensor(data.draw(st.lists(st.lists(st.floats(-2, 2), min_size=n, max_size=n), min_size=prompts)))
    k = data.draw(st.integers(1, n))
    choices = [max(choice) for row in scores.tolist() for choice in itertools.combinations(row, k)]
    assert best_of(scores, k) == pytest.approx(sum(choices) / len(choices), abs=1e-6)


@pytest.mark.parametrize(
    ("scores", "answers", "expected"),
    [
        ([[0, 1, 1, 0]], ["3", "4", "4", "5"], 1),
        ([[1, 0, 0, 0]], ["3", "4", "4", None], 0),
        ([[1, 0, 1, 0]], ["3", "4", "3", "4"], 0.5),  # equally frequent
        ([[0, 1, 0, 0]], [None, "4", None, None], 1),  # what is no answer has no vote
        ([[0.5, 0.25], [1, 0]], [None, None, "1", "1"], (0.375 + 0.5) / 2),
    ],
)
def test_the_majority_votes(scores: list[list[float]], answers: list[str | None], expected: float) -> None:
    assert majority(torch.tensor(scores, dtype=torch.float32), answers) == pytest.approx(expected)


NEEDED: dict[str, Any] = {"model": Path("m"), "prompts": Path("p"), "reward": "regex"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"evaluation.keep_best": True}, "evaluation.keep_best=True needs evaluation.prompts; give that, or leave"),
        ({"evaluation.samples": 4}, "evaluation.samples=4 needs evaluation.prompts"),
        (
            {"evaluation.samples": 4, "eval_prompts": Path("e")},
            "evaluation.samples=4 responses to a prompt are equal at evaluation.temp",
        ),
    ],
)
def test_options_of_an_evaluation_that_do_not_go_together(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        check(TrainOptions(**NEEDED, **options))


def test_the_cache_has_room_for_the_evaluation() -> None:
    options = TrainOptions(
        **NEEDED, prompts_per_step=1, samples=2, **{"evaluation.samples": 5, "evaluation.temperature": 1.0}
    )
    assert cache_options(options, longest=9, eval_prompts=3).sequences == 15
