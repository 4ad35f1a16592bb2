"""`Batch`: its layout, its selections, and the mistakes that it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_layers.head import SamplingMask
from rl_models.batch.batch import Batch

rows = st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=5)


def make(sequences: list[list[int]]) -> Batch:
    numbers = [[token + 0.5 for token in sequence] for sequence in sequences]
    return Batch.from_sequences(sequences, number=numbers)


@given(rows, st.data())
def test_select_and_positions_pick_the_sequences_in_the_order_asked_for(
    sequences: list[list[int]], data: st.DataObject
) -> None:
    batch = make(sequences)
    indices = data.draw(st.lists(st.integers(0, len(sequences) - 1), unique=True))
    chosen = batch.select(indices)
    assert [tokens.tolist() for tokens in chosen.split()] == [sequences[i] for i in indices]
    assert [part.tolist() for part in chosen.split("number")] == [[t + 0.5 for t in sequences[i]] for i in indices]
    assert torch.equal(batch.tokens[batch.positions(indices)], chosen.tokens)


@given(rows, rows)
def test_concatenate_is_the_batch_of_all_sequences(first: list[list[int]], second: list[list[int]]) -> None:
    joined = Batch.concatenate([make(first), make(second)])
    whole = make(first + second)
    assert joined.lengths == whole.lengths
    assert torch.equal(joined.tokens, whole.tokens)
    assert torch.equal(joined.mask, whole.mask)
    assert torch.equal(joined["number"], whole["number"])


def test_a_batch_without_a_drawn_token_leaves_the_others_their_sampling_masks() -> None:
    """An episode may end without a draw."""
    drawn = Batch.from_sequences([[1, 2]], response_lengths=[1], sampling_mask=SamplingMask.from_rows([[], [2, 3]]))
    nothing, unknown = (Batch.from_sequences([[4, 5, 6]], response_lengths=[count]) for count in (0, 1))
    joined = Batch.concatenate([drawn, nothing, drawn])
    assert joined.sampling_mask is not None
    assert joined.sampling_mask.tolist() == [[], [2, 3], [], [], [], [], [2, 3]]
    assert Batch.concatenate([nothing, nothing]).sampling_mask is None
    with pytest.raises(ValueError, match=r"batches \[1\] of 2 have masked tokens without a sampling mask"):
        Batch.concatenate([drawn, unknown])


def test_tokens_of_batches_without_routing_are_left_to_the_routers() -> None:
    """A draw may have no call of an engine, which alone reports the experts."""
    experts = torch.arange(8, dtype=torch.int16).view(2, 2, 2)
    routed, plain = Batch.from_sequences([[1, 2]], routing=[experts]), Batch.from_sequences([[3], [4, 5]])
    filler = torch.full((3, 2, 2), -1, dtype=torch.int16)
    for batches, expected in (([plain, routed], [filler, experts]), ([routed, plain], [experts, filler])):
        routing = Batch.concatenate(batches)["routing"]
        assert routing.dtype == torch.int16
        assert torch.equal(routing, torch.cat(expected))
    assert Batch.concatenate([plain, plain]).fields == {}


@given(rows)
def test_sequence_ids_first_and_sums(sequences: list[list[int]]) -> None:
    batch = make(sequences)
    assert batch.sequence_ids.tolist() == [n for n, sequence in enumerate(sequences) for _ in sequence]
    assert batch.first.tolist() == [i == 0 for sequence in sequences for i in range(len(sequence))]
    expected = [sum(t + 0.5 for t in sequence[1:]) for sequence in sequences]
    assert batch.sum_by_sequence(batch["number"]).tolist() == expected


def test_responses_are_the_last_tokens() -> None:
    batch = Batch.from_sequences([[1, 2, 3], [4], [5, 6]], response_lengths=[2, 0, 1])
    assert [response.tolist() for response in batch.responses()] == [[2, 3], [], [6]]
    assert batch.mask.tolist() == [False, True, True, False, False, True]


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple, list])
@pytest.mark.parametrize("indices", [[0], [2, 0]])
def test_the_numbers_of_sequences_may_be_a_tensor_or_an_array(kind: Any, indices: list[int]) -> None:
    batch = make([[1, 2], [3], [4, 5, 6]])
    chosen = batch.select(kind(indices))
    assert [tokens.tolist() for tokens in chosen.split()] == [[[1, 2], [3], [4, 5, 6]][i] for i in indices]
    assert chosen.lengths == tuple(batch.lengths[i] for i in indices)
    assert {type(length) for length in chosen.lengths} == {int}


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([-1], r"has 2 sequences, and \[-1\] are no numbers of sequences"),
        ([0, 2, 5], r"\[2, 5\] are no numbers of sequences; use numbers in 0..1"),
        ([True, False], r"must be \[n\] integers, got \[2\] torch.bool; turn a bool mask into numbers by mask.nonzero"),
        ([0.0], r"must be \[n\] integers, got \[1\] torch.float32"),
        ([[0]], r"must be \[n\] integers, got \[1, 1\] torch.int64"),
    ],
)
def test_numbers_that_no_sequence_has_are_refused(indices: Any, message: str) -> None:
    batch = make([[1, 2], [3]])
    for method in (batch.select, batch.positions):
        with pytest.raises(ValueError, match=message):
            method(indices)


class Looks(TorchDispatchMode):
    """Counts how often a value of a tensor is read on the host, which waits for a GPU each time."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_batch_looks_at_its_mask_once() -> None:
    tokens, mask = torch.zeros(40, dtype=torch.int64), torch.zeros(40, dtype=torch.bool)
    with Looks() as looks:
        Batch(tokens, (2,) * 20, mask)
    assert looks.count == 1


def test_an_empty_selection_keeps_the_fields() -> None:
    empty = make([[1, 2], [3]]).select([])
    assert len(empty) == 0
    assert empty["number"].shape == (0,)


def test_fields_can_be_added_and_replaced() -> None:
    batch = make([[1, 2], [3]])
    more = batch.with_fields(number=torch.zeros(3), other=torch.ones(3))
    assert more["number"].tolist() == [0, 0, 0]
    assert batch["number"].tolist() == [1.5, 2.5, 3.5]
    assert set(batch.fields) == {"number"}


def test_mistakes_are_refused() -> None:
    batch = make([[1, 2], [3]])
    with pytest.raises(ValueError, match=r"no field 'advantages' \(fields: number\)"):
        batch["advantages"]
    with pytest.raises(ValueError, match=r"other must be \[3\] like the tokens, got \[2\]"):
        batch.with_fields(other=torch.zeros(2))
    for sequence, got in ((3, r"\[\] torch.int64"), ([[1, 2], [3, 4]], r"\[2, 2\] torch.int64"), ([1.5], "float32")):
        with pytest.raises(ValueError, match=rf"sequence 1 must be \[L\] token ids, got .*{got}"):
            Batch.from_sequences([[1, 2], sequence])
    with pytest.raises(ValueError, match=r"advantages must be a tensor \[T\], got list; use torch.tensor"):
        batch.with_fields(advantages=[1, 2, 3])  # type: ignore[arg-type]
    for texts in ("once", ["once", "twice"]):
        with pytest.raises(ValueError, match=r"got (str|the text) 'once'; encode texts first: \[tokenizer.encode"):
            Batch.from_sequences(texts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sequence 1 has 1 tokens and a response of 1"):
        Batch.from_sequences([[1, 2], [3]], response_lengths=[1, 1])
    with pytest.raises(ValueError, match="1 response lengths for 2 sequences"):
        Batch.from_sequences([[1, 2], [3]], response_lengths=[1])
    for numbers, shapes in (([[1.0]], r"\[\[1\]\]"), ([1.0], r"\[\[\]\]"), ([], r"\[\]")):
        with pytest.raises(ValueError, match=rf"number has the shapes {shapes}; .* of the lengths \[2\]"):
            Batch.from_sequences([[1, 2]], number=numbers)
    with pytest.raises(ValueError, match=r"first token of sequences \[1\] is in the mask"):
        Batch(torch.zeros(3, dtype=torch.int64), (2, 1), torch.tensor([False, True, True]))
    with pytest.raises(ValueError, match="add up to the 3 tokens"):
        Batch(torch.zeros(3, dtype=torch.int64), (2,), torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask must be bool"):
        Batch(torch.zeros(1, dtype=torch.int64), (1,), torch.zeros(1))
    with pytest.raises(ValueError, match=r"\[T\] int64"):
        Batch(torch.zeros(1), (1,), torch.zeros(1, dtype=torch.bool))
