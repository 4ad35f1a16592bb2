"""checkpoint: the gradients are bitwise those of a plain call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed.collectives import copy_to_tensor_parallel, reduce_from_tensor_parallel
from parallel_layers.memory.random_states import RngStates
from parallel_layers.memory.recompute import checkpoint

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


class Net(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16, device=device), nn.Linear(16, 8, device=device)
        self.rng = RngStates(device)
        self.rng.add("a", 1)

    def act(self, x: Tensor, p: float = 0.5) -> Tensor:
        """Draws from the default and from a named stream, of the CPU too, and forks in a fork."""
        x = F.dropout(F.gelu(x), p)
        with self.rng.fork("a"):
            x = F.dropout(x, p) * torch.rand(())
            with self.rng.fork("a"):
                return F.dropout(x, 0.1)

    def body(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def plain(net: Net, x: Tensor) -> Tensor:
    return net.body(net.body(x))


def checkpointed(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.body, checkpoint(net.body, x, rng=net.rng), rng=net.rng)


def nested(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda t: checkpoint(net.body, checkpoint(net.body, t, rng=net.rng), rng=net.rng), x, rng=net.rng)


def differentiate(fn: Callable[[Net, Tensor], Tensor], use_grad: bool, device: str) -> list[Tensor]:
    net = Net(device)
    torch.manual_seed(1)
    x = torch.randn(5, 8, device=device, requires_grad=True)
    y = fn(net, x)
    after = torch.rand(3, device=device), torch.rand(3)
    with net.rng.fork("a"):
        after_a = torch.rand(3, device=device), torch.rand(3)
    leaves = [x, *net.parameters()]
    if use_grad:
        grads = list(torch.autograd.grad(y.square().sum(), leaves))
    else:
        y.square().sum().backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    with net.rng.fork("a"):
        return [y.detach(), *after, *after_a, torch.rand(3, device=device), torch.rand(3), *grads]


@on_devices
@pytest.mark.parametrize("use_grad", [False, True])
@pytest.mark.parametrize("fn", [checkpointed, nested])
def test_bitwise_equal_to_a_plain_call(fn: Callable[[Net, Tensor], Tensor], use_grad: bool, device: str) -> None:
    """Outputs, gradients, and what both kinds of streams give afterwards."""
    expected = differentiate(plain, use_grad, device)
    torch.testing.assert_close(differentiate(fn, use_grad, device), expected, rtol=0, atol=0)


@on_devices
@pytest.mark.parametrize("fn", [checkpointed, nested])
def test_a_retained_graph_goes_backward_again(fn: Callable[[Net, Tensor], Tensor], device: str) -> None:
    net, x = Net(device), torch.randn(5, 8, device=device, requires_grad=True)
    loss, leaves = fn(net, x).square().sum(), [x, *net.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for retain in (True, False):
        torch.testing.assert_close(torch.autograd.grad(loss, leaves, retain_graph=retain), first, rtol=0, atol=0)


@on_devices
@pytest.mark.parametrize("fork_in_forward", [False, True])
def test_the_second_run_draws_from_the_stream_of_the_first(fork_in_forward: bool, device: str) -> None:
    """Wherever the backward runs: in no fork, or in one that the forward was not in."""

    def scope(net: Net, is_forked: bool) -> contextlib.AbstractContextManager[None]:
        return net.rng.fork("a") if is_forked else contextlib.nullcontext()

    def gradient(run: Callable[[Net, Tensor], Tensor]) -> Tensor:
        net, x = Net(device), torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        torch.manual_seed(1)
        with scope(net, fork_in_forward):
            y = run(net, x)
        with scope(net, not fork_in_forward):
            return torch.autograd.grad(y.square().sum(), x)[0]

    assert torch.equal(gradient(checkpointed), gradient(plain))


@on_devices
def test_the_default_generator_is_replayed_without_streams(device: str) -> None:
    x = torch.randn(64, device=device, requires_grad=True)
    y = checkpoint(F.dropout, x * 1, 0.5)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, (y != 0) * 2.0)


class TensorParallel:
    """Two products with each rank's part of one weight, and dropout between and behind them."""

    def __init__(self, group: ProcessGroup, p: float, device: str) -> None:
        self.group, self.p = group, p
        self.rng = RngStates.tensor_parallel(7, group, device)

    def up(self, x: Tensor, weight: Tensor) -> Tensor:
        return copy_to_tensor_parallel(x, self.group) @ self.part(weight).t()

    def act(self, hidden: Tensor) -> Tensor:
        with self.rng.fork("sharded"):
            return F.dropout(torch.tanh(hidden), self.p)

    def down(self, activation: Tensor, weight: Tensor) -> Tensor:
        out = reduce_from_tensor_parallel(activation @ self.part(weight), self.group)
        with self.rng.fork("replicated"):
            return F.dropout(out, self.p)

    def part(self, weight: Tensor) -> Tensor:
        return weight.chunk(self.group.size())[self.group.rank()]

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.down(self.act(self.up(x, weight)), weight)


def in_both_ways(group: ProcessGroup, x: Tensor, weight: Tensor, p: float, device: str) -> list[Tensor]:
    """The output and the gradients of a plain call; raises where recomputation does not give the same bits."""
    results = []
    for recompute in (False, True):
        body = TensorParallel(group, p, device)
        leaf, w = (t.to(device, copy=True).requires_grad_() for t in (x, weight))
        out = checkpoint(body.plain, leaf * 2, w, rng=body.rng) if recompute else body.plain(leaf * 2, w)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), [leaf, w])])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    return results[0]


def test_dropout_on_two_ranks_has_the_bits_of_a_plain_call(on_two_ranks: Callable[..., list[Any]]) -> None:
    """Recompute dropout that differs between the ranks, and dropout that is the same on both."""
    (out, grad_x, grad_w), (other_out, other_grad_x, other_grad_w) = on_two_ranks(
        in_both_ways, torch.randn(16, 6), torch.randn(32, 6), 0.5
    )
    assert torch.equal(out, other_out)
    assert torch.equal(grad_x, other_grad_x)
    assert 0 < (out == 0).sum() < out.numel()
    assert not grad_w[16:].any()
    assert not other_grad_w[:16].any()
