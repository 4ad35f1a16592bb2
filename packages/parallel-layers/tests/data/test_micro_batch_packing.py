"""Packing: dummies, padding, and zig-zag parts that hold every token once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_layers import PackedSequence, next_token_labels
from parallel_layers.data.micro_batch_packing import pack_micro_batches, pack_zigzag, pad_to, unpack_zigzag


def test_micro_batches_are_packed_and_dummies_hold_padding_alone() -> None:
    sequences = [torch.arange(n) + 1 for n in (3, 1, 2)]
    first, second, dummy = pack_micro_batches(sequences, [[0, 2], [1], []], multiple_of=4, pad_id=9)
    assert first.input_ids.tolist() == [1, 2, 3, 1, 2, 9, 9, 9]
    assert second.input_ids.tolist() == [1, 9, 9, 9]
    assert dummy.input_ids.tolist() == [9] * 4
    assert (dummy.num_sequences, dummy.padding) == (0, 4)
    assert (next_token_labels(dummy) == -100).all()


def test_without_samples_dummies_are_on_the_device_that_is_asked_for() -> None:
    device = torch.device("meta")
    (dummy,) = pack_micro_batches([], [[]], multiple_of=2, device=device)
    nothing = pack_zigzag([], cp=2, device=device)
    tensors = (dummy.input_ids, dummy.position_ids, dummy.cu_seqlens, nothing.input_ids, nothing.cu_seqlens)
    assert {tensor.device for tensor in tensors} == {device}
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


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (3, 2)])
def test_zigzag_parts_hold_every_token_once(tp: int, cp: int) -> None:
    for length in range(4 * tp * cp + 1):
        sequences = [torch.arange(length) + 100, torch.arange(3) + 200, torch.arange(0), torch.arange(7) + 300]
        whole = torch.cat(sequences)
        parts = [pack_zigzag(sequences, tp=tp, cp=cp, rank=rank, pad_id=-7) for rank in range(cp)]
        sizes = {len(part.input_ids) for part in parts}
        assert len(sizes) == 1
        assert sizes.pop() % tp == 0
        assert sum(part.source.ge(0).sum().item() for part in parts) == len(whole)
        for part in parts:
            real = part.source >= 0
            assert torch.equal(part.input_ids[real], whole[part.source[real]])
            assert (part.input_ids[~real] == -7).all()
            assert part.cu_seqlens[-1] == len(part.input_ids) * cp
        restored = unpack_zigzag([(part, part.input_ids.float()) for part in parts], len(whole))
        assert torch.equal(restored, whole.float())
        # the work of causal attention, keys seen by all queries, is equal on all ranks
        work = [(part.position_ids + 1).sum().item() for part in parts]
        assert cp == 1 or len(set(work)) == 1


def test_zigzag_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"rank=2 is not in 0\.\.1"):
        pack_zigzag([torch.arange(3)], cp=2, rank=2)
    part = pack_zigzag([torch.arange(3)], cp=2, rank=0)
    with pytest.raises(ValueError, match="do not hold each of 3 tokens exactly once"):
        unpack_zigzag([(part, part.input_ids), (part, part.input_ids)], 3)
