"""The ready rewards: what is right, what is wrong, and rows that they cannot read."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from rl_train.rewards.ready import READY


def ready(name: str) -> Any:
    """Return the function of a ready reward."""
    module, _, function = READY[name].partition(":")
    return getattr(importlib.import_module(module), function)


@pytest.mark.parametrize(
    ("name", "response", "row", "expected", "answer"),
    [
        ("exact-match", " 12\n", {"answer": 12}, 1, "12"),
        ("exact-match", "12.0", {"answer": 12}, 0, "12.0"),
        ("number-match", "7 * 8 is 56.", {"answer": "56"}, 1, "56"),
        ("number-match", "56, no, 57", {"answer": 56}, 0, "57"),
        ("number-match", "It is 1,234.50", {"answer": 1234.5}, 1, "1234.5"),
        ("number-match", "about -3.1e2", {"answer": -300, "tolerance": 0.05}, 1, "-310"),
        ("number-match", "about -3.1e2", {"answer": -300}, 0, "-310"),
        ("number-match", "none", {"answer": 0}, 0, None),
        ("regex", "<answer>4</answer>", {"pattern": r"<answer>\d+</answer>$"}, 1, "<answer>4</answer>"),
        ("regex", "<answer>4</answer>", {"pattern": r"<answer>(\d+)</answer>$"}, 1, "4"),
        ("regex", "4", {"pattern": "[a-z]"}, 0, None),
    ],
)
def test_scores_and_answers(name: str, response: str, row: dict[str, Any], expected: float, answer: str | None) -> None:
    assert ready(name)("", response, row) == (expected, answer)


@pytest.mark.parametrize(
    ("name", "response", "row", "error"),
    [
        ("exact-match", "4", {"text": "2+2"}, "the row has no 'answer'; its entries are 'text'"),
        ("number-match", "4", {"answer": "four"}, "could not convert string to float: 'four'"),
        ("regex", [4], {"pattern": "4"}, "ready rewards read text"),
    ],
)
def test_a_row_that_a_reward_cannot_read_is_named(name: str, response: Any, row: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ready(name)("", response, row)
