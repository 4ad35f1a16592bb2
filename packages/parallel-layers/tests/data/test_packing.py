from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from parallel_layers.data.micro_batches import pad_to
from parallel_layers.data.packing import PackedSequence, next_token_labels, pack, unpack

# At most 54 tokens: the ids fit into all of them.
dtypes = st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
value_dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
lengths_lists = st.lists(st.integers(0, 9), max_size=6)


def sequences(lengths: list[int]) -> list[torch.Tensor]:
    """Distinct ids over the whole batch, so that a misplaced token is seen."""
    ids = torch.arange(1, sum(lengths) + 1)
    return list(ids.split(lengths)) if lengths else []


def test_the_layout_in_the_module_docstring() -> None:
    packed = PackedSequence.from_sequences(sequences([3, 1, 2]), multiple_of=4)
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6, 8]
    assert (packed.max_seqlen, packed.padding, packed.num_tokens, packed.num_sequences) == (3, 2, 8, 3)
    assert next_token_labels(packed).tolist() == [2, 3, -100, -100, 6, -100, -100, -100]


@given(lengths_lists, st.integers(1, 8), dtypes)
def test_packing_properties(lengths: list[int], multiple_of: int, dtype: torch.dtype) -> None:
    parts = sequences(lengths)
    packed = PackedSequence.from_sequences([p.to(dtype) for p in parts], multiple_of=multiple_of)
    assert packed.input_ids.dtype == packed.position_ids.dtype == torch.int64
    assert packed.num_tokens % multiple_of == 0
    assert packed.padding < multiple_of
    assert packed.lengths == lengths
    assert packed.num_sequences == len(lengths)
    assert packed.cu_seqlens[-1] == packed.num_tokens
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == max([*lengths, packed.padding], default=0)
    assert packed.input_ids[packed.num_tokens - packed.padding :].eq(0).all()
    assert all(torch.equal(a, b) for a, b in zip(packed.split(packed.input_ids), parts, strict=True))
    assert all(p.tolist() == list(range(len(p))) for p in packed.split(packed.position_ids))
    for part, label in zip(parts, packed.split(next_token_labels(packed)), strict=True):
        assert label.tolist() == [*part[1:].tolist(), *([-100] if len(part) else [])]
    assert next_token_labels(packed)[packed.num_tokens - packed.padding :].eq(-100).all()


@given(lengths_lists.filter(bool), st.sampled_from(["left", "right"]), st.integers(1, 4), st.data())
def test_pack_and_unpack_are_inverse(lengths: list[int], side: str, multiple_of: int, data: st.DataObject) -> None:
    width = max(lengths) + data.draw(st.integers(0, 2))
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    padded = torch.zeros(len(lengths), width, dtype=torch.long).masked_scatter(mask, torch.arange(1, sum(lengths) + 1))
    packed = pack(padded, mask.long(), multiple_of=multiple_of)
    assert torch.equal(unpack(packed.input_ids, packed, mask), padded)
    if side == "right":
        assert torch.equal(unpack(packed.input_ids, packed), padded[:, : max(lengths)])


@given(lengths_lists, st.integers(1, 4), value_dtypes, st.lists(st.integers(0, 3), max_size=2))
def test_unpack_lays_out_what_split_cuts(
    lengths: list[int], multiple_of: int, dtype: torch.dtype, trailing: list[int]
) -> None:
    packed = PackedSequence.from_sequences(sequences(lengths), multiple_of=multiple_of)
    values = (
        torch.arange(packed.num_tokens * math.prod(trailing)).view(packed.num_tokens, *trailing).remainder(50).to(dtype)
    )
    rows = unpack(values, packed)
    assert rows.dtype == dtype
    assert rows.shape == (len(lengths), max(lengths, default=0), *trailing)
    for row, part in zip(rows, packed.split(values), strict=True):
        assert torch.equal(row[: len(part)], part)
        assert not row[len(part) :].any()


def test_unpack_carries_trailing_dims_padding_value_and_gradient() -> None:
    packed = PackedSequence.from_sequences(sequences([2, 0, 1]), multiple_of=4)
    values = torch.arange(8.0).reshape(4, 2).requires_grad_()
    out = unpack(values, packed, padding_value=-1.0)
    assert out.tolist() == [[[0, 1], [2, 3]], [[-1, -1], [-1, -1]], [[4, 5], [-1, -1]]]
    out.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]


def test_one_sequence_of_one_token_and_none_at_all() -> None:
    assert next_token_labels(PackedSequence.from_sequences(sequences([1]))).tolist() == [-100]
    empty = PackedSequence.from_sequences([], multiple_of=4)
    assert (empty.num_tokens, empty.num_sequences, empty.cu_seqlens.tolist()) == (0, 0, [0])
    assert next_token_labels(empty).tolist() == []
    assert unpack(empty.input_ids, empty).shape == (0, 0)


def test_to_returns_the_same_batch() -> None:
    packed = PackedSequence.from_sequences(sequences([3, 2]), multiple_of=4)
    moved = packed.to("meta")
    assert moved.input_ids.is_meta
    assert moved.position_ids.is_meta
    assert moved.cu_seqlens.is_meta
    assert (moved.max_seqlen, moved.padding) == (packed.max_seqlen, packed.padding)


def test_mistakes_are_named() -> None:
    ids = torch.arange(4)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens must be 1-D torch.int32, got 1-D torch.int64"):
        PackedSequence(ids, ids, cu.long(), 4)
    with pytest.raises(ValueError, match="3 position_ids for 4 input_ids"):
        PackedSequence(ids, ids[:3], cu, 4)
    with pytest.raises(ValueError, match=r"padding=5 is outside 0\.\.4"):
        PackedSequence(ids, ids, cu, 4, padding=5)
    for bounds, longest, padding, message in (
        ([0, 3], 3, 0, r"cu_seqlens \[0, 3\] must start at 0, never decrease, and end at the 4 tokens; padding is"),
        ([0, 5], 5, 0, r"cu_seqlens \[0, 5\] must start at 0, never decrease, and end at the 4 tokens"),
        ([3, 1], 3, 0, r"cu_seqlens \[3, 1\] must start at 0, never decrease, and end at the 4 tokens"),
        ([0, 3, 1, 4], 3, 0, r"cu_seqlens \[0, 3, 1, 4\] must start at 0, never decrease, and end at the 4 tokens"),
        ([0, 3, 4], 2, 0, "max_seqlen=2 is less than the longest segment, 3 tokens"),
        ([0, 3, 4], 3, 2, "padding=2, but the last segment has 1 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedSequence(ids, ids, torch.tensor(bounds, dtype=torch.int32), longest, padding)
    with pytest.raises(ValueError, match=r"sequence 0 must be a tensor of token ids, got list"):
        PackedSequence.from_sequences([[1, 2]])
    with pytest.raises(ValueError, match="sequence 1 must be 1-D token ids"):
        PackedSequence.from_sequences([ids, ids.float()])
    with pytest.raises(ValueError, match="multiple_of=0"):
        PackedSequence.from_sequences([ids], multiple_of=0)
    packed = PackedSequence.from_sequences([ids])
    with pytest.raises(ValueError, match="one row for each of 4 tokens"):
        packed.split(ids[:3])
    with pytest.raises(ValueError, match=r"keeps \[3\] tokens in its rows, the sequences have \[4\]"):
        unpack(ids, packed, torch.tensor([[1, 1, 1, 0]]))
    with pytest.raises(ValueError, match="must both be"):
        pack(ids, ids)


def test_positions_of_three_axes_are_padded_with_the_tokens() -> None:
    packed = PackedSequence.from_sequences([torch.arange(3), torch.arange(2)])
    axes = torch.arange(15).view(3, 5)
    padded = pad_to(replace(packed, rotary_positions=axes), 8)
    assert torch.equal(padded.rotary_positions[:, :5], axes)
    assert padded.rotary_positions[:, 5:].tolist() == [[0, 1, 2]] * 3
    assert padded.to("cpu").rotary_positions is not None
    for wrong in (axes[:2], axes.int(), axes[0]):
        with pytest.raises(ValueError, match=r"rotary_positions must be \[3, 5\] int64"):
            replace(packed, rotary_positions=wrong)
