"""The log-probs of an engine in tensors, and what is no log-prob."""

from __future__ import annotations

import math
import re

import pytest

from rl_train.engines.interface import SequenceLogProbs


def test_the_token_and_the_likeliest_have_columns() -> None:
    rows = [{}, {7: math.log(0.1), 3: math.log(0.5), 2: math.log(0.3)}, {3: math.log(0.5), 2: math.log(0.3)}]
    result = SequenceLogProbs.of([4, 7, 2], rows, 2)
    assert result.top_ids.tolist() == [[-1, -1, -1], [7, 3, 2], [3, 2, -1]]
    assert result.log_probs.exp().tolist() == pytest.approx([1, 0.1, 0.3])
    assert result.top_log_probs[1:].exp().flatten().tolist() == pytest.approx([0.1, 0.5, 0.3, 0.5, 0.3, 1])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{}], "log-probs of 1 of 2 tokens"),
        ([{}, {3: -1.0, 2: -2.0}], "2 log-probs in place of token 1, 7; it must have that of the token and of the 2"),
        ([{}, {7: -1.0}], "1 log-probs in place of token 1, 7"),
        ([{}, {7: math.nan, 3: -1.0}], "no log-probs in place of token 1: [nan, -1.0]"),
        ([{}, {7: -math.inf, 3: -1.0}], "no log-probs in place of token 1"),
        ([{}, {7: 2.5, 3: 1.0}], "or the server reports logits"),
    ],
)
def test_what_is_no_log_prob_is_refused(rows: list[dict[int, float]], message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        SequenceLogProbs.of([4, 7], rows, 2)
