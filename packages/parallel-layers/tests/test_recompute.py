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

from parallel_layers.collectives import copy_to_tensor_parallel, reduce_from_tensor_parallel
from parallel_layers.random import RngStates, checkpoint, recomputed
from parallel_layers.testing import RankPool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.rng = RngStates()
        self.rng.add("a", 1)

    def act(self, x: Tensor, p: float = 0.5) -> Tensor:
        """Draws from the default and from a named stream, and forks in a fork."""
        x = F.dropout(F.gelu(x), p)
        with self.rng.fork("a"):
            x = F.dropout(x, p)
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


def differentiate(fn: Callable[[Net, Tensor], Tensor], use_grad: bool) -> list[Tensor]:
    net = Net()
    torch.manual_seed(1)
    x = torch.randn(5, 8, requires_grad=True)
    y = fn(net, x)
    after = torch.rand(3)
    with net.rng.fork("a"):
        after_a = torch.rand(3)
    leaves = [x, *net.parameters()]
    if use_grad:
        grads = list(torch.autograd.grad(y.square().sum(), leaves))
    else:
        y.square().sum().backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    with net.rng.fork("a"):
        return [y.detach(), after, after_a, torch.rand(3), *grads]


@pytest.mark.parametrize("use_grad", [False, True])
@pytest.mark.parametrize("fn", [checkpointed, nested, dropped, dropped_in_checkpoint])
def test_bitwise_equal_to_a_plain_call(fn: Callable[[Net, Tensor], Tensor], use_grad: bool) -> None:
    """Outputs, gradients, and what both kinds of streams give afterwards."""
    torch.testing.assert_close(differentiate(fn, use_grad), differentiate(plain, use_grad), rtol=0, atol=0)


@pytest.mark.parametrize("fork_in_forward", [False, True])
def test_the_second_run_draws_from_the_stream_of_the_first(fork_in_forward: bool) -> None:
    """Wherever the backward runs: in no fork, or in one that the forward was not in."""

    def scope(net: Net, is_forked: bool) -> contextlib.AbstractContextManager[None]:
        return net.rng.fork("a") if is_forked else contextlib.nullcontext()

    def gradient(run: Callable[[Net, Tensor], Tensor]) -> Tensor:
        net, x = Net(), torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        torch.manual_seed(1)
        with scope(net, fork_in_forward):
            y = run(net, x)
        with scope(net, not fork_in_forward):
            return torch.autograd.grad(y.square().sum(), x)[0]

    for run in (checkpointed, dropped):
        assert torch.equal(gradient(run), gradient(plain))


def test_the_default_generator_is_replayed_without_streams() -> None:
    x = torch.randn(64, requires_grad=True)
    for run in (lambda: checkpoint(F.dropout, x * 1, 0.5), lambda: _through_recomputed(x)):
        y = run()
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, (y != 0) * 2.0)


def _through_recomputed(x: Tensor) -> Tensor:
    with recomputed(F.dropout, x * 1, 0.5) as y:
        return y * 1


def test_recomputed_runs_once_more_and_holds_no_output() -> None:
    calls = []

    def act(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sigmoid().square()

    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)
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


def tensor_parallel_body(group: ProcessGroup, x: Tensor, weight: Tensor) -> Tensor:
    part = weight.chunk(group.size())[group.rank()]
    hidden = torch.tanh(copy_to_tensor_parallel(x, group) @ part.t())
    return reduce_from_tensor_parallel(hidden @ part, group)


def sharded_inputs(group: ProcessGroup, x: Tensor, weight: Tensor) -> tuple[list[Tensor], int]:
    results: list[Any] = []
    held = 0
    for shard_group in (None, group):
        leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        hidden = leaf * 2
        out = checkpoint(tensor_parallel_body, group, hidden, w, shard_group=shard_group)
        reference = weakref.ref(hidden)
        del hidden
        if shard_group is not None:
            held = reference() is not None
        results.append(torch.autograd.grad(out.square().sum(), [leaf, w]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    return list(results[1]), held


@pytest.mark.parametrize("tokens", [4, 3])
def test_saved_inputs_are_sharded(ranks: RankPool, tokens: int) -> None:
    """3 tokens of 3 numbers do not divide by 2: they are saved whole."""
    x, weight = torch.randn(tokens, 3, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = torch.autograd.grad((torch.tanh(leaf * 2 @ w.t()) @ w).square().sum(), [leaf, w])
    results = ranks.run(sharded_inputs, x, weight, world=2)
    for grads, held in results:
        torch.testing.assert_close(grads[0], expected[0])
        assert held == (x.numel() % 2 == 1)
    torch.testing.assert_close(results[0][0][1] + results[1][0][1], expected[1])


def saved_sizes(group: ProcessGroup) -> list[int]:
    """How much of a checkpointed argument stays alive on this rank."""
    sizes: list[int] = []
    x = torch.randn(8, 4, requires_grad=True) * 2
    out = checkpoint(torch.tanh, x, shard_group=group)
    node = out.grad_fn
    storage = weakref.ref(x.untyped_storage())
    del x
    sizes.append(int(storage() is not None))
    assert node is not None
    return sizes


def test_the_whole_argument_is_not_held(ranks: RankPool) -> None:
    assert ranks.run(saved_sizes, world=2) == [[0], [0]]


class AllGathers(TorchDispatchMode):
    """How many elements the memory of each all-gather's input has: of all that it is a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather" in func.__name__:
            self.sizes.append(args[0].untyped_storage().nbytes() // args[0].element_size())
        return func(*args, **(kwargs or {}))


def gathered_sizes(group: ProcessGroup) -> tuple[list[int], list[int]]:
    x = torch.randn(8, 4, requires_grad=True) * 2
    with AllGathers() as forward:
        out = checkpoint(torch.tanh, x, shard_group=group)
    with AllGathers() as backward:
        out.sum().backward()
    return forward.sizes, backward.sizes


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_holds_its_part_of_the_argument(ranks: RankPool, world: int) -> None:
    assert ranks.run(gathered_sizes, world=world) == [([], [8 * 4 // world])] * world


@pytest.mark.parametrize("backward_too", [False, True])
def test_a_second_run_is_under_the_autocast_of_the_first(backward_too: bool) -> None:
    """Not under that of the backward, which is usually called outside."""

    def gradients(drop: bool) -> list[Tensor]:
        torch.manual_seed(0)
        x, up, down = (torch.randn(shape, requires_grad=True) for shape in ((4, 8), (8, 8), (8, 8)))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not backward_too):
            with recomputed(lambda t: F.gelu(F.linear(t, up)), x) if drop else contextlib.nullcontext() as activation:
                out = F.linear(F.gelu(F.linear(x, up)) if activation is None else activation, down)
            del activation
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward_too):
            return list(torch.autograd.grad(out.float().square().sum(), (x, up, down)))

    for got, expected in zip(gradients(True), gradients(False), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
