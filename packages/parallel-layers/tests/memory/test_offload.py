"""Offload: every view finds its numbers again, gradients come back as zeros, the host holds one copy."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_layers.memory import HostOffload


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().clone().view(torch.uint8)


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3).bfloat16())
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
        assert freed == sum(tensor.nbytes for tensor in (*tensors, *gradients))
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
    assert host._buffer.numel() <= 4000 + 2400 + 2 * 128
    host.onload()
    first = host._buffer.data_ptr()
    host.offload(tensors[:1])
    host.onload()
    assert host._buffer.data_ptr() == first
    assert torch.equal(views[0], tensors[0][10:20])


class NewMemory(TorchDispatchMode):
    """Counts the bytes of the memories that operations make, beside those of `tensors` and of their arguments."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in tensors}
        self.made: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        results = func(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given | self.known:
                self.made[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return results


def test_the_host_makes_one_copy_and_then_none() -> None:
    tensors = [torch.randn(1000), torch.arange(3000), torch.randn(70).bfloat16()]
    host = HostOffload()
    sizes = [x.nbytes for x in tensors]
    for copies in (1, 0):
        with NewMemory(tensors) as memory:
            host.offload(tensors)
        assert copies * sum(sizes) <= sum(memory.made.values()) <= copies * (sum(sizes) + 5 * 128)
        host.onload()


@pytest.mark.gpu
def test_pinned_memory_is_reused_on_a_gpu() -> None:
    net = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512).bfloat16()).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    tensors = [x for x in state_of(net, optimizer) if x.is_cuda]
    gradients = [parameter.grad for parameter in net.parameters()]
    nbytes = sum(x.nbytes for x in tensors)
    host = HostOffload()
    places = set()
    for _ in range(2):
        before = [bits(x) for x in tensors]
        torch.cuda.synchronize()
        held, pinned = torch.cuda.memory_allocated(), host._buffer.data_ptr() if places else None
        assert host.offload(tensors, discard=gradients) >= nbytes
        assert torch.cuda.memory_allocated() <= held - nbytes
        assert host._buffer.is_pinned()
        assert host._buffer.numel() <= nbytes + 128 * len(tensors)
        assert pinned in (None, host._buffer.data_ptr())
        places.add(host._buffer.data_ptr())
        host.onload()
        assert all(torch.equal(bits(x), old) for x, old in zip(tensors, before, strict=True))
        assert all(not gradient.any() for gradient in gradients)
    assert len(places) == 1
    # A larger offload makes a larger buffer, and gives the smaller one's pages back.
    more = torch.randn(1 << 20, device="cuda")
    host.offload([*tensors, more])
    host.onload()
    assert host._buffer.is_pinned()
    assert host._buffer.numel() <= nbytes + more.nbytes + 128 * (len(tensors) + 1)


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


@pytest.mark.parametrize("discarded", [False, True])
def test_memory_that_is_not_torchs_own_is_refused_before_anything_moves(discarded: bool) -> None:
    own, foreign, host = torch.ones(3), torch.frombuffer(bytearray(12), dtype=torch.float32), HostOffload()
    with pytest.raises(ValueError, match=r"memory of 12 bytes \(1 in all\) cannot be freed.*clone\(\) the tensors"):
        host.offload([own, *[foreign] * (not discarded)], discard=[foreign])
    assert not host.offloaded
    assert own.tolist() == [1, 1, 1]
