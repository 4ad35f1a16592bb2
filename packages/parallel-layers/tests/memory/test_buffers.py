"""Buffers: aligned, bounds checked, of every dtype, and really shared with what is mapped into them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parallel_layers.memory import ContiguousBuffer, NamedBuffers, map_parameters, plan_slots

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 7), max_size=3)


@given(tensors=st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12))
def test_tensors_are_aligned_disjoint_and_hold_their_values(tensors: list[tuple[list[int], torch.dtype]]) -> None:
    named = {
        f"t{i}": (torch.arange(torch.Size(shape).numel()).view(shape) + i).to(dtype)
        for i, (shape, dtype) in enumerate(tensors)
    }
    buffers = NamedBuffers.like(named)
    buffers.copy_from(named)
    assert list(buffers) == list(named)
    for name, tensor in named.items():
        torch.testing.assert_close(buffers[name], tensor, rtol=0, atol=0)
        assert buffers[name].is_contiguous()
        # torch gives an empty tensor no address.
        assert tensor.numel() == 0 or buffers[name].data_ptr() % 128 == 0
        assert (
            buffers[name].untyped_storage().data_ptr()
            == buffers.buffers[tensor.dtype].data.untyped_storage().data_ptr()
        )
    assert len(buffers.buffers) == len({tensor.dtype for tensor in named.values()})
    gaps = 127 * len(named)
    assert buffers.nbytes <= sum(tensor.nbytes for tensor in named.values()) + gaps


def test_the_plan_follows_the_order_alone() -> None:
    slots, sizes = plan_slots({"a": ((3,), torch.float32), "i": ((2, 2), torch.int64), "b": ((40,), torch.float32)})
    assert [slots[name].offset for name in "aib"] == [0, 0, 32]
    assert sizes == {torch.float32: 32 + 64, torch.int64: 16}


@pytest.mark.parametrize(
    ("offset", "shape"), [(64, [1]), (32, [33]), (-32, [4]), (0, [65]), (0, [-1]), (0, [2, -1, -40])]
)
def test_nothing_is_carved_outside_the_buffer(offset: int, shape: list[int]) -> None:
    with pytest.raises(ValueError, match="does not lie within a buffer of 64 elements"):
        ContiguousBuffer(64, torch.float32).carve(offset, shape)


def test_an_unaligned_offset_is_refused() -> None:
    with pytest.raises(ValueError, match=r"offset=8 is not a multiple of 16 torch.int64"):
        ContiguousBuffer(64, torch.int64).carve(8, [4])


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="numel=-1"):
        ContiguousBuffer(-1, torch.int64)


def test_copy_from_copies_nothing_unless_all_fits() -> None:
    buffers = NamedBuffers({"a": ((2,), torch.float32), "b": ((2,), torch.int64)})
    with pytest.raises(ValueError, match=r"b is \(3,\) torch.int64, its slot \(2,\) torch.int64"):
        buffers.copy_from({"a": torch.ones(2), "b": torch.ones(3, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"names differ.*'b', 'c'"):
        buffers.copy_from({"a": torch.ones(2), "c": torch.ones(2)})
    assert buffers["a"].eq(0).all()


def test_mapped_parameters_and_gradients_train_as_before() -> None:
    torch.manual_seed(0)
    model, reference = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    reference.load_state_dict(model.state_dict())
    parameters = map_parameters(dict(model.named_parameters()))
    gradients = map_parameters(dict(model.named_parameters()), gradients=True)
    for module in (model, reference):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            module(torch.full((2, 5), float(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=module is reference)
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameters[name], parameter)
        assert gradients[name].data_ptr() == dict(model.named_parameters())[name].grad.data_ptr()


def test_a_tied_parameter_is_mapped_once() -> None:
    tied = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="a and b are one parameter"):
        map_parameters({"a": tied, "b": tied})
    assert not map_parameters({})
