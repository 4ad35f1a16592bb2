"""Offload: every view finds its numbers again, gradients come back as zeros, the host holds one copy."""

import pytest
import torch
from torch import nn

from megatron_utils.memory import HostOffload, map_parameters


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().clone().view(torch.uint8)


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3).bfloat16())
    map_parameters(dict(net.named_parameters()))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    step(net, optimizer, 1.0)
    return net, optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    net[1](net[0](torch.full((2, 5), value)).bfloat16()).float().square().sum().backward()
    optimizer.step()
    for parameter in net.parameters():
        parameter.grad.zero_()


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for entries in optimizer.state.values() for value in entries.values()]
    return [*net.parameters(), *moments]


def test_training_goes_on_bit_for_bit() -> None:
    net, optimizer = training()
    other, reference = training()
    host = HostOffload()
    for value in (2.0, 3.0, 4.0):
        tensors = state_of(net, optimizer)
        before = [bits(tensor) for tensor in tensors]
        gradients = [parameter.grad for parameter in net.parameters()]
        freed = host.offload(tensors, discard=gradients)
        assert host.offloaded
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*tensors, *gradients))
        # fp32 and bf16 parameters lie in one buffer each; nothing is counted twice.
        assert freed >= sum(tensor.nbytes for tensor in (*tensors, *gradients))
        host.onload()
        assert all(torch.equal(bits(tensor), old) for tensor, old in zip(tensors, before, strict=True))
        assert all((gradient == 0).all() for gradient in gradients)
        step(net, optimizer, value)
        step(other, reference, value)
    for one, two in zip(state_of(net, optimizer), state_of(other, reference), strict=True):
        assert torch.equal(one, two)


def test_the_host_holds_one_copy_in_one_buffer() -> None:
    tensors = [torch.randn(1000), torch.arange(300), torch.zeros(0)]
    views = [tensors[0][10:20], tensors[0].view(10, 100)]
    host = HostOffload()
    assert host.offload([*tensors, *views]) == 4000 + 2400
    assert host.host_bytes <= 4000 + 2400 + 2 * 128
    host.onload()
    first = host._buffer.data.data_ptr()
    host.offload(tensors[:1])
    host.onload()
    assert host._buffer.data.data_ptr() == first
    assert torch.equal(views[0], tensors[0][10:20])


def test_what_is_kept_and_discarded_is_kept() -> None:
    x = torch.randn(8)
    expected = x.clone()
    host = HostOffload()
    host.offload([x], discard=[x[2:]])
    with pytest.raises(RuntimeError, match="offloaded already"):
        host.offload([x])
    host.onload()
    host.onload()
    assert torch.equal(x, expected)
