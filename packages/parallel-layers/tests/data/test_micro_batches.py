"""The splitter: every sample once, the cap hard, the work balanced, the order restorable, the ranks agreed."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed import ProcessGroup

from parallel_layers import PackedSequence, next_token_labels
from parallel_layers.data.micro_batches import pack_micro_batches, pad_to, restore_order, split_micro_batches
from parallel_layers.testing import RankPool

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


@given(lengths=LENGTHS, slack=st.integers(0, 60), multiple=st.integers(1, 4), least=st.integers(1, 6))
def test_every_sample_once_under_the_cap(lengths: list[int], slack: int, multiple: int, least: int) -> None:
    cap = max([*lengths, 1]) + slack
    split = split_micro_batches(lengths, cap, count_multiple_of=multiple, min_count=least)
    assert sorted(index for members in split for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= cap for members in split)
    assert all(members == sorted(members) for members in split)
    assert len(split) % multiple == 0
    assert len(split) >= least
    # Dummies come last, and only where there are too few samples.
    filled = sum(bool(members) for members in split)
    assert all(split[:filled])
    assert filled == min(len(split), len(lengths))
    assert split == split_micro_batches(lengths, cap, count_multiple_of=multiple, min_count=least)
    results = [[lengths[index] for index in members] or ["dummy"] for members in split]
    assert restore_order(results, split) == lengths


@given(lengths=LENGTHS)
def test_no_more_micro_batches_than_one_a_pair_of_halves(lengths: list[int]) -> None:
    # Best fit leaves at most one bin half empty, so twice the lower bound is never exceeded.
    cap = max([*lengths, 1])
    split = split_micro_batches(lengths, cap)
    assert len(split) <= max(1, 2 * math.ceil(sum(lengths) / cap))


@given(samples=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=30), least=st.integers(1, 4))
def test_samples_of_a_unit_stay_together(samples: list[tuple[int, int]], least: int) -> None:
    lengths, units = [length for length, _ in samples], [unit for _, unit in samples]
    sizes = [sum(length for length, of in samples if of == unit) for unit in set(units)]
    cap = max([*sizes, 1])
    split = split_micro_batches(lengths, cap, units=units, min_count=least)
    assert sorted(index for members in split for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= cap for members in split)
    places = [{units[index] for index in members} for members in split]
    assert sum(map(len, places)) == len(set(units)), "no unit is in two micro-batches"
    assert sum(map(bool, places)) == min(len(split), len(set(units)))


def cost(length: int) -> float:
    """The work of a sequence of a decoder with 4096 channels, in units of one token's linears."""
    return length + length**2 / (12 * 4096)


def test_the_work_is_balanced_not_the_tokens() -> None:
    # The long sample's tokens are those of 16 short ones, its work is that of 30.
    lengths = [49152] + [3072] * 30
    assert cost(49152) == pytest.approx(30 * cost(3072), rel=0.01)
    assert split_micro_batches(lengths, 200_000, min_count=2) == [[0], list(range(1, 31))]


@given(lengths=st.lists(st.integers(1, 50), min_size=8, max_size=60), count=st.integers(2, 6))
def test_the_heaviest_is_close_to_the_best_possible(lengths: list[int], count: int) -> None:
    split = split_micro_batches(lengths, sum(lengths), min_count=count)
    work = [sum(cost(lengths[index]) for index in members) for members in split]
    best = max(sum(work) / len(work), max(map(cost, lengths)))
    # Graham's bound against this lower bound: the mean, and one more sample.
    assert max(work) <= best + max(map(cost, lengths))
    assert max(work) - min(work) <= max(map(cost, lengths))


def test_best_fit_where_spreading_finds_no_room() -> None:
    # 5 + 5 and 4 + 3 + 3 fill two micro-batches of 10; the lightest-first rule would put 5 and 5 apart.
    assert split_micro_batches([5, 5, 4, 3, 3], 10) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (
            [3, 12, 4],
            {"max_tokens": 10},
            "sample 1 has 12 tokens, more than max_tokens=10 .*; raise max_tokens or shorten the sample",
        ),
        ([3, -1], {"max_tokens": 10}, "sample 1 has -1 tokens, more than max_tokens=10 or less than 0"),
        (
            [3, 1, 8],
            {"max_tokens": 10, "units": [7, 0, 7]},
            r"samples \[0, 2\], which stay together, have \[3, 8\] tokens, more than max_tokens=10",
        ),
        ([3], {"max_tokens": 0}, "max_tokens=0"),
        ([3], {"max_tokens": 4, "count_multiple_of": 0}, "count_multiple_of=0"),
        ([3], {"max_tokens": 4, "min_count": 0}, "min_count=0"),
    ],
)
def test_mistakes_are_named(lengths: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_micro_batches(lengths, **options)


def test_restore_order_wants_a_result_for_each_sample() -> None:
    with pytest.raises(ValueError, match="micro-batch 1 has 2 samples but 1 results"):
        restore_order([[1], [2]], [[0], [1, 2]])
    with pytest.raises(ValueError, match="1 results for 2 micro-batches"):
        restore_order([[1]], [[0], [1]])


def split_on(group: ProcessGroup, lengths_by_rank: list[list[int]], cap: int) -> list[list[int]] | str:
    try:
        return split_micro_batches(lengths_by_rank[group.rank()], cap, group=group, count_multiple_of=2)
    except ValueError as error:
        return str(error)


def test_ranks_agree_on_the_count(ranks: RankPool) -> None:
    first, second = ranks.run(split_on, [[9, 9, 9, 9, 9], [2]], 10, world=2)
    assert len(first) == len(second) == 6
    assert sum(bool(members) for members in first) == 5
    assert second == [[0], [], [], [], [], []]


def test_a_sample_above_the_cap_raises_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks.run(split_on, [[1], [2, 11]], 10, world=2)
    assert first.startswith("a sample on another rank of the group has more than max_tokens=10")
    assert second.startswith("sample 1 has 11 tokens")


def test_a_negative_length_raises_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks.run(split_on, [[1, 11], [2, -3]], 10, world=2, timeout=60)
    assert first.startswith("sample 1 has 11 tokens")
    assert second.startswith("sample 1 has -3 tokens")


def test_micro_batches_are_packed_and_dummies_hold_padding_alone() -> None:
    sequences = [torch.arange(n) + 1 for n in (3, 1, 2)]
    first, second, dummy = pack_micro_batches(sequences, [[0, 2], [1], []], multiple_of=4)
    assert first.input_ids.tolist() == [1, 2, 3, 1, 2, 0, 0, 0]
    assert second.input_ids.tolist() == [1, 0, 0, 0]
    assert dummy.input_ids.tolist() == [0] * 4
    assert (dummy.num_sequences, dummy.padding) == (0, 4)
    assert (next_token_labels(dummy) == -100).all()


def test_without_samples_dummies_are_on_the_device_that_is_asked_for() -> None:
    device = torch.device("meta")
    (dummy,) = pack_micro_batches([], [[]], multiple_of=2, device=device)
    assert {tensor.device for tensor in (dummy.input_ids, dummy.position_ids, dummy.cu_seqlens)} == {device}
    (dummy,) = pack_micro_batches([torch.arange(3)], [[]], device=device)
    assert dummy.input_ids.device == torch.device("cpu")


@given(lengths=st.lists(st.integers(0, 6), max_size=4), multiple=st.integers(1, 4), more=st.integers(0, 9))
def test_padding_changes_nothing_else(lengths: list[int], multiple: int, more: int) -> None:
    sequences = [torch.arange(n) + 1 for n in lengths]
    packed = PackedSequence.from_sequences(sequences, multiple_of=multiple)
    longer = pad_to(packed, packed.num_tokens + more)
    assert longer.num_tokens == packed.num_tokens + more
    assert longer.num_sequences == packed.num_sequences
    assert longer.lengths == lengths
    for name in ("input_ids", "position_ids"):
        for one, other in zip(packed.split(getattr(packed, name)), longer.split(getattr(longer, name)), strict=True):
            assert torch.equal(one, other)
    assert longer.max_seqlen == max([*lengths, longer.padding])
    assert longer.cu_seqlens[-1] == longer.num_tokens
    assert longer.position_ids[longer.num_tokens - longer.padding :].tolist() == list(range(longer.padding))


def test_a_batch_cannot_be_padded_to_less() -> None:
    with pytest.raises(ValueError, match="num_tokens=2 is less than the batch's 3"):
        pad_to(PackedSequence.from_sequences([torch.arange(3)]), 2)
