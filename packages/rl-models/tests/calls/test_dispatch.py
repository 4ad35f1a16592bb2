"""How batches and prompts are divided, and results joined, without ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, strategies as st

from rl_models import Batch, TokenLogProbs
from rl_models.calls.dispatch import divide, per_prompt, per_sequence, per_token


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 4))
def test_per_token_results_come_back_in_the_callers_order(lengths: list[int], dp: int) -> None:
    total = sum(lengths)
    batch = Batch.from_sequences(
        [torch.arange(length) for length in lengths], place=torch.arange(float(total)).split(lengths) if lengths else []
    )
    parts, join = per_token(batch, dp, vocab_size=40)
    assert len(parts) == dp
    joined = join([TokenLogProbs(part["place"], -part["place"]) for part in parts])
    assert isinstance(joined, TokenLogProbs)
    assert joined.log_probs.tolist() == list(range(total))
    assert torch.equal(joined.entropy, -joined.log_probs)
    assert torch.equal(join([part["place"] for part in parts]), joined.log_probs)
    # Routing, [T, M, k].
    routing = join([part["place"].short()[:, None, None].expand(-1, 2, 3) for part in parts])
    assert (routing.dtype, routing.shape) == (torch.int16, (total, 2, 3))
    assert routing[:, 1, 2].tolist() == list(range(total))


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 4))
def test_per_sequence_results_come_back_in_the_callers_order(lengths: list[int], dp: int) -> None:
    numbers = [[float(n)] * length for n, length in enumerate(lengths)]
    batch = Batch.from_sequences([[0] * length for length in lengths], number=numbers)
    parts, join = per_sequence(batch, dp, vocab_size=1)
    means = [torch.tensor([float(row.sum()) for row in part.split("number")]) for part in parts]
    assert join(means).tolist() == [float(n * length) for n, length in enumerate(lengths)]


@example([1, 1, 1, 4, 4, 4, 4, 4], 4)  # five fours on four ranks: 8 is the best there is
@given(st.lists(st.integers(1, 100), min_size=8, max_size=40), st.integers(1, 4))
def test_parts_are_balanced(lengths: list[int], dp: int) -> None:
    """The longest-processing-time rule: a part had no more than an equal share when its shortest sequence joined it."""
    for part in divide(lengths, dp):
        own = [lengths[i] for i in part]
        # One percent for the cost of attention, by which it really balances.
        assert sum(own) - min(own) <= 1.01 * (sum(lengths) - min(own)) / dp


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(1, 4), st.integers(1, 3))
def test_responses_come_back_in_the_order_of_the_prompts(lengths: list[int], dp: int, n: int) -> None:
    prompts = [[i] * length for i, length in enumerate(lengths)]
    parts, join = per_prompt(prompts, dp, vocab_size=20)
    results = [
        Batch.from_sequences([torch.cat([prompt, torch.tensor([10 + k])]) for prompt in part for k in range(n)])
        for part in parts
    ]
    expected = [[*prompt, 10 + k] for prompt in prompts for k in range(n)]
    assert [row.tolist() for row in join(results).split()] == expected


def test_what_one_rank_alone_would_refuse_is_refused_before() -> None:
    with pytest.raises(ValueError, match=r"token id 9 at index \[1\] is outside the vocabulary"):
        per_token(Batch.from_sequences([[1, 9]]), 2, vocab_size=9)
    with pytest.raises(ValueError, match=r"prompt 1: token id 9 at index \[0\] is outside the vocabulary"):
        per_prompt([[1], [9]], 2, vocab_size=9)
    with pytest.raises(ValueError, match=r"prompts \[1\] are empty"):
        per_prompt([[1], []], 2, vocab_size=9)
    with pytest.raises(ValueError, match="expected a Batch, got list; make one with"):
        per_token([[1]], 2, vocab_size=9)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=12), st.integers(1, 3))
def test_the_sequences_of_a_group_come_to_one_rank(rows: list[tuple[int, int]], dp: int) -> None:
    given_groups = [torch.full((length,), group) for length, group in rows]
    batch = Batch.from_sequences([torch.ones(length, dtype=torch.int64) for length, _ in rows], group=given_groups)
    parts, join = per_sequence(batch, dp, vocab_size=2)
    seen = [set(part["group"].tolist()) for part in parts]
    assert sum(map(len, seen)) == len({group for length, group in rows if length})
    assert join([torch.tensor(part.lengths, dtype=torch.int64) for part in parts]).tolist() == list(batch.lengths)
