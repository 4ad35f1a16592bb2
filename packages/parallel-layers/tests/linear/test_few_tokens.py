"""Exchanges of few tokens, by collectives on gloo and in one kernel on GPUs, against sums in the order of the ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.linear.few_tokens import HALF_BYTES, exchange_few, sum_and_add, sum_and_norm, takes
from parallel_layers.norm.rms import RMSNorm
from parallel_layers.testing import RankPool

KINDS = ("all-reduce", "reduce-scatter", "all-gather")
# Of few elements, of no whole tile, and of the largest size: [rows, columns] of a rank with even rows.
SHAPES = [(2, 2), (4, 72), (128, 4096), (256, 8192)]


def numbers(rank: int, shape: tuple[int, int], seed: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def expected(kind: str, rank: int, ranks: int, shape: tuple[int, int], seed: int, device: str) -> Tensor:
    tensors = [numbers(number, shape, seed, device) for number in range(ranks)]
    if kind == "all-gather":
        return torch.cat(tensors)
    total = torch.zeros(shape, device=device)
    for tensor in tensors:
        total += tensor.float()
    total = total.to(tensors[0].dtype)
    return total.chunk(ranks)[rank] if kind == "reduce-scatter" else total


def exchange(group: ProcessGroup, device: str) -> None:
    rank, ranks = group.rank(), group.size()
    for seed, shape in enumerate(SHAPES * 2):
        for kind in KINDS:
            x = numbers(rank, shape, seed, device)
            assert takes(x, group) == (device == "cuda")
            assert torch.equal(exchange_few(x, group, kind), expected(kind, rank, ranks, shape, seed, device)), kind


def test_every_kind_on_gloo(ranks: RankPool) -> None:
    ranks.run(exchange, "cpu", world=2)


@pytest.mark.gpu(2)
def test_every_kind_on_gpus(nccl_ranks: RankPool) -> None:
    nccl_ranks.run(exchange, "cuda", timeout=100)


def sum_with_residual(group: ProcessGroup, device: str) -> None:
    """The bits of an all-reduce and an addition, and the norm: few elements, no whole tile, many rows."""
    for seed, shape in enumerate([(3, 8), (5, 200), (128, 4096), (256, 4096)] * 2):
        x, residual = (numbers(rank, shape, seed, device) for rank in (group.rank(), 9))
        norm = RMSNorm(shape[1], unit_offset=seed % 2 == 1, device=device, dtype=x.dtype)
        with torch.no_grad():
            norm.weight.copy_(numbers(8, (1, shape[1]), seed, device)[0])
            stream = residual + expected("all-reduce", group.rank(), group.size(), shape, seed, device)
            normed, total = sum_and_norm(x, residual, norm, group)
            assert torch.equal(sum_and_add(x, residual, group), stream)
            assert torch.equal(total, stream)
            torch.testing.assert_close(normed.float(), norm(stream.float()), rtol=2.0**-8, atol=0)


def test_sums_with_the_residual_and_the_norm_on_gloo(ranks: RankPool) -> None:
    ranks.run(sum_with_residual, "cpu", world=2)


@pytest.mark.gpu(2)
def test_sums_with_the_residual_and_the_norm_on_gpus(nccl_ranks: RankPool) -> None:
    nccl_ranks.run(sum_with_residual, "cuda", timeout=100)


def replay(group: ProcessGroup) -> None:
    """An odd number of exchanges of unlike sizes in a graph, each rank as late as it likes."""
    rank, ranks = group.rank(), group.size()
    inputs = [numbers(rank, shape, 0, "cuda") for shape in SHAPES[:3]]

    def step() -> list[Tensor]:
        return [exchange_few(x, group, kind) for x, kind in zip(inputs, KINDS, strict=True)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for seed in range(40):
        for x, shape in zip(inputs, SHAPES, strict=False):
            x.copy_(numbers(rank, shape, seed, "cuda"))
        torch.cuda._sleep(int(1e6) * ((seed + rank) % 2))
        graph.replay()
        for out, shape, kind in zip(outputs, SHAPES, KINDS, strict=False):
            assert torch.equal(out, expected(kind, rank, ranks, shape, seed, "cuda")), (seed, kind)


@pytest.mark.gpu(2)
def test_in_a_graph_and_out_of_step(nccl_ranks: RankPool) -> None:
    nccl_ranks.run(replay, timeout=100)


def back_to_back(group: ProcessGroup) -> list[bool]:
    """Exchanges without the host between them, so that a rank runs as far ahead as the others let it."""
    inputs = [numbers(group.rank(), (8, 64), seed, "cuda") for seed in range(300)]
    outputs = [exchange_few(x, group, "all-reduce") for x in inputs]
    return [
        torch.equal(out, expected("all-reduce", group.rank(), group.size(), (8, 64), seed, "cuda"))
        for seed, out in enumerate(outputs)
    ]


@pytest.mark.gpu(2)
def test_many_in_a_row(nccl_ranks: RankPool) -> None:
    assert all(all(result) for result in nccl_ranks.run(back_to_back, timeout=100))


@pytest.mark.gpu(2)
def test_larger_tensors_go_by_the_groups_collectives(nccl_ranks: RankPool) -> None:
    assert nccl_ranks.run(is_taken, HALF_BYTES // 2 + 1) == [False, False]
    assert nccl_ranks.run(is_taken, HALF_BYTES // 2) == [True, True]


def is_taken(group: ProcessGroup, count: int) -> bool:
    return takes(torch.empty(count, dtype=torch.bfloat16, device="cuda"), group)
