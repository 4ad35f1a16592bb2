"""Marks, padding of any rank, and the sum of the marked gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import ProcessGroup

from megatron_utils.sequence_parallel import (
    all_reduce_gradients,
    is_sequence_parallel,
    mark_sequence_parallel,
    pad_to_group,
    sequence_parallel_parameters,
    unpad,
)
from parallel_layers.testing import RankPool


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), size=st.integers(1, 4), data=st.data())
def test_padding_any_rank_and_back(shape: list[int], size: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = torch.randn(shape, requires_grad=True)
    padded = pad_to_group(x, size, dim=dim, value=7.0)
    assert padded.shape[dim] % size == 0
    assert padded.shape[dim] - x.shape[dim] < size
    assert torch.equal(unpad(padded, x.shape[dim], dim=dim), x)
    added = padded.narrow(dim, x.shape[dim], padded.shape[dim] - x.shape[dim])
    assert (added == 7.0).all()
    padded.sum().backward()
    assert x.grad is not None
    assert (x.grad == 1).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: pad_to_group(x, 0), "group_size=0"),
        (lambda x: pad_to_group(x, 2, dim=2), r"dim=2 is not a dim of a tensor of shape \[3, 4\]"),
        (lambda x: unpad(x, 5, dim=1), r"size=5 is outside 0\.\.4, the size of dim 1"),
        (lambda x: unpad(x, 1, dim=-3), "dim=-3"),
    ],
)
def test_mistakes_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 4))  # type: ignore[operator]


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4, dtype=torch.float64), nn.LayerNorm(4))
    mark_sequence_parallel([*net[0].parameters(), *net[2].parameters(), *net[3].parameters()])
    mark_sequence_parallel([net[3].bias], marked=False)
    return net


def test_marks_are_found() -> None:
    net = model()
    names = [name for name, _ in sequence_parallel_parameters(net)]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight"]
    assert not is_sequence_parallel(net[1].weight)


def reduce_on(group: ProcessGroup) -> None:
    net = model()
    rank, size = group.rank(), group.size()
    for number, (name, parameter) in enumerate(net.named_parameters()):
        if name != "0.bias":
            parameter.grad = torch.full_like(parameter, number + 10.0 * rank)
    # Megatron's buffer takes precedence.
    net[3].weight.main_grad = torch.full((4,), 100.0 + rank)
    assert all_reduce_gradients(net, group) == (4 if size > 1 else 0)
    total = sum(range(size))
    for number, (name, parameter) in enumerate(net.named_parameters()):
        if name in ("0.weight", "2.weight", "2.bias"):
            assert (parameter.grad == size * number + 10.0 * total).all()
        elif name != "0.bias":
            assert (parameter.grad == number + 10.0 * rank).all()
    assert (net[3].weight.main_grad == 100.0 * size + total).all()
    assert net[0].bias.grad is None
    assert all_reduce_gradients(net, None) == 0
    with pytest.raises(ValueError, match=r"group=2 must be a torch\.distributed\.ProcessGroup, such as grid\.tp"):
        all_reduce_gradients(net, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_the_marked_gradients_are_summed(ranks: RankPool, tp: int) -> None:
    ranks.run(reduce_on, world=tp)
