"""checkpoint and recomputed: bitwise the gradients of a plain call, and what is saved meanwhile."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_layers.distributed.collectives import copy_to_tensor_parallel, reduce_from_tensor_parallel
from parallel_layers.memory.random_states import RngStates, checkpoint, recomputed
from parallel_layers.testing import RankPool

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


def dropped(net: Net, x: Tensor) -> Tensor:
    for _ in range(2):
        with recomputed(net.act, net.up(x), rng=net.rng) as activation:
            x = net.down(activation)
    return x


def dropped_in_checkpoint(net: Net, x: Tensor) -> Tensor:
    return checkpoint(dropped, net, x, rng=net.rng)


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
@pytest.mark.parametrize("fn", [checkpointed, nested, dropped, dropped_in_checkpoint])
def test_bitwise_equal_to_a_plain_call(fn: Callable[[Net, Tensor], Tensor], use_grad: bool, device: str) -> None:
    """Outputs, gradients, and what both kinds of streams give afterwards."""
    expected = differentiate(plain, use_grad, device)
    torch.testing.assert_close(differentiate(fn, use_grad, device), expected, rtol=0, atol=0)


@on_devices
@pytest.mark.parametrize("fn", [checkpointed, nested, dropped, dropped_in_checkpoint])
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

    for run in (checkpointed, dropped):
        assert torch.equal(gradient(run), gradient(plain))


@on_devices
def test_the_default_generator_is_replayed_without_streams(device: str) -> None:
    x = torch.randn(64, device=device, requires_grad=True)
    for run in (lambda: checkpoint(F.dropout, x * 1, 0.5), lambda: _through_recomputed(x)):
        y = run()
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, (y != 0) * 2.0)


def _through_recomputed(x: Tensor) -> Tensor:
    with recomputed(F.dropout, x * 1, 0.5) as y:
        return y * 1


@on_devices
def test_recomputed_runs_once_more_and_holds_no_output(device: str) -> None:
    calls = []

    def act(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sigmoid().square()

    weight = torch.randn(4, 4, device=device, requires_grad=True)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    with recomputed(act, x) as y:
        a, b = y @ weight, (y.reshape(-1) * 2).square().sum()
    storage = weakref.ref(y.untyped_storage())
    gone = weakref.ref(y)
    del y
    assert gone() is None
    assert storage() is None
    assert len(calls) == 1
    got = torch.autograd.grad(a.square().sum() + b, [x, weight], retain_graph=True)
    assert len(calls) == 2
    y = x.sigmoid().square()
    expected = torch.autograd.grad((y @ weight).square().sum() + (2 * y).square().sum(), [x, weight])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    again = torch.autograd.grad(a.square().sum() + b, [x, weight])
    torch.testing.assert_close(again, got, rtol=0, atol=0)


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

    def dropped(self, x: Tensor, weight: Tensor) -> Tensor:
        with recomputed(self.act, self.up(x, weight), rng=self.rng) as activation:
            return self.down(activation, weight)


# How the body is run; whether what is saved is sharded.
WAYS: dict[str, tuple[Callable[[TensorParallel, Tensor, Tensor], Tensor], bool]] = {
    "plain": (TensorParallel.plain, False),
    "whole": (lambda body, *args: checkpoint(body.plain, *args, rng=body.rng), False),
    "sharded": (lambda body, *args: checkpoint(body.plain, *args, rng=body.rng, shard_group=body.group), True),
    "dropped": (TensorParallel.dropped, False),
    "dropped in sharded": (
        lambda body, *args: checkpoint(body.dropped, *args, rng=body.rng, shard_group=body.group),
        True,
    ),
}


def in_all_ways(group: ProcessGroup, x: Tensor, weight: Tensor, p: float, device: str) -> list[Tensor]:
    """The output and the gradients of a plain call; raises where another way does not give the same bits."""
    results: dict[str, list[Tensor]] = {}
    for way, (run, shards) in WAYS.items():
        body = TensorParallel(group, p, device)
        leaf, w = (t.to(device, copy=True).requires_grad_() for t in (x, weight))
        hidden = leaf * 2
        out = run(body, hidden, w)
        storage = weakref.ref(hidden.untyped_storage())
        del hidden
        if shards:
            assert (storage() is not None) == (x.numel() % group.size() != 0), way
        results[way] = [out.detach(), *torch.autograd.grad(out.square().sum(), [leaf, w])]
        torch.testing.assert_close(
            results[way], results["plain"], rtol=0, atol=0, msg=lambda text, at=way: f"{at}: {text}"
        )
    return results["plain"]


@pytest.mark.parametrize("tokens", [4, 3])
def test_sharded_saving_gives_the_gradients_of_the_whole(on_two_ranks: Callable[..., list[Any]], tokens: int) -> None:
    """3 tokens of 3 numbers do not divide by 2: they are saved whole."""
    x, weight = torch.randn(tokens, 3, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = torch.tanh(leaf * 2 @ w.t()) @ w
    expected = torch.autograd.grad(out.square().sum(), [leaf, w])
    results = on_two_ranks(in_all_ways, x, weight, 0.0)
    for rank_out, rank_leaf, _ in results:
        torch.testing.assert_close(rank_out, out.detach())
        torch.testing.assert_close(rank_leaf, expected[0])
    torch.testing.assert_close(results[0][2] + results[1][2], expected[1])


def test_sharded_saving_and_dropout_give_the_bits_of_a_plain_call(on_two_ranks: Callable[..., list[Any]]) -> None:
    """Recompute dropout that differs between the ranks, and dropout that is the same on both."""
    (out, grad_x, grad_w), (other_out, other_grad_x, other_grad_w) = on_two_ranks(
        in_all_ways, torch.randn(16, 6), torch.randn(32, 6), 0.5
    )
    assert torch.equal(out, other_out)
    assert torch.equal(grad_x, other_grad_x)
    assert 0 < (out == 0).sum() < out.numel()
    assert not grad_w[16:].any()
    assert not other_grad_w[:16].any()


class AllGathers(TorchDispatchMode):
    """How many elements the memory of each all-gather's input has: of all that it is a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather" in func.__name__:
            self.sizes.append(args[0].untyped_storage().nbytes() // args[0].element_size())
        return func(*args, **(kwargs or {}))


def gathered_sizes(group: ProcessGroup, device: str) -> tuple[list[int], list[int]]:
    x = torch.randn(8, 4, device=device, requires_grad=True) * 2
    with AllGathers() as forward:
        out = checkpoint(torch.tanh, x, shard_group=group)
    with AllGathers() as backward:
        out.sum().backward()
    return forward.sizes, backward.sizes


def test_each_rank_holds_its_part_of_the_argument(on_two_ranks: Callable[..., list[Any]]) -> None:
    assert on_two_ranks(gathered_sizes) == [([], [8 * 4 // 2])] * 2


def test_each_of_four_ranks_holds_its_part_of_the_argument(ranks: RankPool) -> None:
    assert ranks.run(gathered_sizes, "cpu") == [([], [8 * 4 // 4])] * 4


@on_devices
@pytest.mark.parametrize("backward_too", [False, True])
def test_a_second_run_is_under_the_autocast_of_the_first(backward_too: bool, device: str) -> None:
    """The second run takes the autocast of the forward; the backward usually runs outside of it."""

    def gradients(drop: bool) -> list[Tensor]:
        torch.manual_seed(0)
        shapes = (4, 8), (8, 8), (8, 8)
        x, up, down = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not backward_too):
            with recomputed(lambda t: F.gelu(F.linear(t, up)), x) if drop else contextlib.nullcontext() as activation:
                out = F.linear(F.gelu(F.linear(x, up)) if activation is None else activation, down)
            del activation
        with torch.autocast(device, dtype=torch.bfloat16, enabled=backward_too):
            return list(torch.autograd.grad(out.float().square().sum(), (x, up, down)))

    for got, expected in zip(gradients(True), gradients(False), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
