"""The process of a reward sends numbers, answers and errors, each of a bounded length and valid in UTF-8."""

from __future__ import annotations

from rl_train.processes.errors import encodable
from rl_train.rewards.worker import checked, raised


def test_halves_of_surrogate_pairs_are_joined_or_replaced() -> None:
    assert encodable("a\ud83d\ude00 \ud83d b\udc80") == "a😀 \ufffd b\ufffd"
    assert checked((1, "\udc80")).answer == "\ufffd"
    assert raised(ValueError("\udc80"), None) == "raised ValueError: \ufffd"


def test_long_answers_are_cut_and_different_ones_stay_different() -> None:
    first, second = (checked((1, "x" * 10**6 + end)).answer for end in "ab")
    assert first is not None
    assert second is not None
    assert len(first) < 11_000
    assert first != second
    assert first[:10_000] == second[:10_000]
    assert checked((1, "x" * 10_000)).answer == "x" * 10_000
