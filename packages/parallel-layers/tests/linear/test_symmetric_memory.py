"""Products over memory that ranks write into each other's: in order, on any number of ranks, call after call."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_peer_memory import peer_memory_on_cpu
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.kernels.sum import sum_parts
from parallel_layers.linear import symmetric_memory
from parallel_layers.linear.symmetric_memory import (
    gather_matmul,
    matmul_reduce_scatter,
    peer_memory,
    why_not_peers,
    why_not_symmetric_memory,
)
from parallel_layers.testing import RankPool

IN, OUT = 24, 20
on_gpus = [pytest.param(world, marks=pytest.mark.gpu(gpus)) for world, gpus in ((2, 2), (3, 4), (4, 4))]


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Small ones, whose products and sums are exact in every order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.flatten(0, -2).T @ x.flatten(0, -2)


def calls_in_a_row(group: ProcessGroup, bias: bool) -> None:
    size, rank = group.size(), group.rank()
    with peer_memory_on_cpu():
        for call, rows in enumerate((5, 1, 7, 7, 2)):
            x = whole_numbers(size * rows, 3, IN, seed=call)
            weight, add = whole_numbers(OUT, IN, seed=100 + call), whole_numbers(OUT, seed=200 + call)
            expected = x @ weight.T + add * bias
            y, gathered = gather_matmul(x.chunk(size)[rank], weight, add if bias else None, group, keep=True)
            assert torch.equal(y, expected)
            assert torch.equal(gathered, x)
            assert torch.equal(gather_matmul(x.chunk(size)[rank], weight, None, group)[0], x @ weight.T)
            for more in range(2):
                parts = [whole_numbers(size * rows, 3, IN, seed=300 + call + r + more) for r in range(size)]
                y, _ = matmul_reduce_scatter(parts[rank], weight, add if bias else None, group)
                total = torch.stack(parts).sum(0) @ weight.T
                assert torch.equal(y, (total + add * bias).chunk(size)[rank])
            dys = [whole_numbers(size * rows, 3, OUT, seed=400 + call + r) for r in range(size)]
            dx, dw = matmul_reduce_scatter(
                dys[rank], weight.T, None, group, x.chunk(size)[rank], partial(weight_gradient, dys[rank])
            )
            assert torch.equal(dx, (torch.stack(dys).sum(0) @ weight).chunk(size)[rank])
            assert torch.equal(dw, weight_gradient(dys[rank], x))


@pytest.mark.parametrize(
    ("world", "bias"), [(2, True), (3, False), (4, True), pytest.param(4, False, marks=pytest.mark.slow)]
)
def test_calls_follow_each_other(ranks: RankPool, world: int, bias: bool) -> None:
    """Calls of unequal sizes and kinds follow each other: received data is read before it is overwritten."""
    ranks.run(calls_in_a_row, bias, world=world)


def test_tokens_that_do_not_divide_are_refused() -> None:
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(ValueError, match="3"):
        matmul_reduce_scatter(torch.ones(3, IN), torch.ones(OUT, IN), None, group)


def test_peers() -> None:
    ids = [b"a", b"b", b"c"]
    assert why_not_peers(1, ids, [b"b", b"c"], lambda own, other: (own, other) == (1, 2)) is None
    reason = why_not_peers(1, ids, [b"b", b"a"], lambda own, other: (own, other) == (1, 2))
    assert reason == "GPU 1 has no peer access to GPU 0 (rank 1): they are not linked by NVLink"
    assert "rank 0 is on another host or hidden" in str(why_not_peers(1, ids, [b"d", b"b"], lambda own, other: True))


def why_not_linked(group: ProcessGroup, unlinked: tuple[int, int] | None, broken: int | None) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
        patch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: (own, other) != unlinked)
        mapped = "torch could not map" if group.rank() == broken else None
        patch.setattr(symmetric_memory, "_why_not_mapped", lambda group, device: mapped)
        return symmetric_memory._why_not_linked(group, torch.device("cpu"), group.rank())


def test_ranks_agree(ranks: RankPool) -> None:
    """One rank's reason is a reason for all: none must wait in a product for one that went another way."""
    assert why_not_symmetric_memory(None, torch.device("cpu")) == "one rank has nothing to send"
    assert ranks.run(why_not_linked, None, None, world=2) == [None, None]
    first, second = ranks.run(why_not_linked, (0, 1), None, world=2)
    assert "GPU 0 has no peer access to GPU 1 (rank 1)" in first
    assert second == "another rank of the group cannot"
    assert ranks.run(why_not_linked, None, 1, world=2) == ["another rank of the group cannot", "torch could not map"]


def timeout_of_a_new_group(group: ProcessGroup) -> timedelta | None:
    new = dist.new_group(timeout=timedelta(minutes=3))
    try:
        return symmetric_memory.time_limit(new)
    finally:
        dist.barrier(new)  # gloo fails where one rank destroys a group that another still connects
        dist.destroy_process_group(new)


def test_barriers_wait_as_long_as_the_group(ranks: RankPool) -> None:
    assert ranks.run(timeout_of_a_new_group) == [timedelta(minutes=3)] * 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (2, 5, 7), (3, 4096), (4, 1000, 33), (2, 0)], ids=str)
def test_parts_are_summed_in_order_and_rounded_once(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    parts = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    total = torch.zeros(shape[1:], device=device, dtype=torch.promote_types(dtype, torch.float32))
    for part in parts:
        total = total + part
    found = sum_parts(parts)
    assert found.dtype == dtype
    torch.testing.assert_close(found, total.to(dtype), rtol=1e-6 if dtype.itemsize > 2 else 0, atol=0)


def in_graphs(group: ProcessGroup) -> None:
    """Replays between calls: of an odd number of calls, and of ones whose memory has been outgrown since."""
    device = torch.device("cuda", torch.cuda.current_device())
    size, rank = group.size(), group.rank()
    # Of -1, 0 and 1: what comes out is exact in bf16, too.
    weight = whole_numbers(OUT * 8, IN * 8, seed=1).sign().to(device, torch.bfloat16)

    def tokens(rows: int, features: int, seed: int) -> Tensor:
        return whole_numbers(size * rows, features, seed=seed).sign().to(device, torch.bfloat16)

    def mine(x: Tensor) -> Tensor:
        return x.chunk(size)[rank]

    def run(x: Tensor, other: Tensor) -> list[Tensor]:
        """A gather, a scatter, the backward of a gather, and a gather, of x; `other` has the features of a product."""

        def use(gathered: Tensor) -> Tensor:
            return weight_gradient(x.float(), gathered.float())

        return [
            gather_matmul(mine(x), weight, None, group)[0],
            matmul_reduce_scatter(x, weight, None, group)[0],
            *matmul_reduce_scatter(x, weight, None, group, mine(other), use),
            gather_matmul(mine(x), weight, None, group)[0],
        ]

    def check(found: list[Tensor], x: Tensor, other: Tensor) -> None:
        y = x.float() @ weight.float().T
        dw = weight_gradient(x.float(), other.float())
        for result, expected in zip(found, (y, mine(y * size), mine(y * size), dw, y), strict=True):
            assert torch.equal(result, expected.to(result.dtype))

    static = tokens(64, IN * 8, 0), tokens(64, OUT * 8, 1)
    torch.cuda.synchronize()
    for left_by_other_tests in (symmetric_memory._memories, symmetric_memory._in_graphs):
        left_by_other_tests.pop(group, None)
    run(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = run(*static)
    held = peer_memory(group, 1, device)
    for turn in range(6):
        x, other = tokens(64, IN * 8, 10 + turn), tokens(64, OUT * 8, 20 + turn)
        static[0].copy_(x)
        static[1].copy_(other)
        graph.replay()
        graph.replay()
        rows = 64 if turn < 3 else 64 * 50
        eager = tokens(rows, IN * 8, 30 + turn), tokens(rows, OUT * 8, 40 + turn)
        check(run(*eager), *eager)
        check(outputs, x, other)
    torch.cuda.synchronize()
    assert peer_memory(group, 1, device) is not held
    assert symmetric_memory._in_graphs[group] == {held}
    graph.reset()


@pytest.mark.parametrize("world", on_gpus)
def test_graphs_between_calls(request: pytest.FixtureRequest, world: int) -> None:
    request.getfixturevalue("nccl_ranks" if world == 2 else "four_nccl_ranks").run(in_graphs, world=world)


def grown_in_a_graph(group: ProcessGroup) -> str:
    device = torch.device("cuda", torch.cuda.current_device())
    x, weight = torch.ones(1 << 14, IN * 8, device=device), torch.ones(OUT, IN * 8, device=device)
    async_collectives.all_reduce(x[:1], group)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError) as caught,
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        gather_matmul(x, weight, None, group)
    return str(caught.value)


@pytest.mark.gpu(2)
def test_memory_does_not_grow_in_a_graph(nccl_ranks: RankPool) -> None:
    for message in nccl_ranks.run(grown_in_a_graph, world=2):
        assert "run the function once before capturing it" in message
