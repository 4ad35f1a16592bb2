"""The kernels over memory of other ranks: beside a peer whose tensor is there already, and as two ranks of one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_layers.kernels import peers
from parallel_layers.kernels.rms_norm import fused_rms_norm
from parallel_layers.norm.rms import rms_norm

HALF_BYTES = 1 << 21


class Ranks:
    """The buffers and counters of two ranks on one device."""

    def __init__(self, device: torch.device) -> None:
        self.buffers = torch.zeros(2, peers.FLAG_BYTES + 2 * HALF_BYTES, dtype=torch.uint8, device=device)
        numbers = self.buffers[:, : peers.FLAG_BYTES].view(torch.int32)[:, : 2 * peers.BLOCKS]
        self.flags = numbers.view(2, peers.BLOCKS, 2)
        self.addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers], device=device)
        self.counters = torch.zeros(2, peers.BLOCKS, dtype=torch.int32, device=device)

    def arguments(self, rank: int) -> dict[str, Any]:
        memory = {"buffers": self.addresses.data_ptr(), "half_bytes": HALF_BYTES, "counters": self.counters[rank]}
        return {**memory, "rank": rank, "ranks": 2}


@pytest.mark.parametrize("rank", [0, 1])
def test_sum_add_and_norm(device: torch.device, unit: dict[torch.dtype, float], rank: int) -> None:
    shape, dtype = (130, 24), torch.float32
    ranks = Ranks(device)
    flags, counters = ranks.flags, ranks.counters[rank]
    data = ranks.buffers[:, peers.FLAG_BYTES :].view(dtype).view(2, 2, -1)
    for call in (1, 2, 3):
        x, other, residual = torch.randn(3, *shape, device=device)
        weight = torch.randn(shape[1], device=device)
        flags[rank, :, 1 - rank] = call  # the peer has written its tensor
        data[1 - rank, call % 2, : x.numel()] = other.flatten()
        total, normed = torch.empty_like(x), torch.zeros_like(x)
        peers.sum_and_norm(
            x, residual, weight if call < 3 else None, total, normed, eps=1e-5, unit_offset=call == 2,
            **ranks.arguments(rank),
        )  # fmt: skip
        first, second = (x, other) if rank == 0 else (other, x)
        assert torch.equal(total, (first + second) + residual)
        expected = rms_norm(total.double(), weight.double(), eps=1e-5, unit_offset=call == 2)
        expected = expected if call < 3 else torch.zeros_like(expected)
        torch.testing.assert_close(normed.double(), expected, rtol=8 * unit[dtype], atol=0)
        assert torch.equal(flags[1 - rank, :, rank], counters)
        assert bool((counters == call).all())


def calls(ranks: Ranks, rank: int, parts: list[Tensor], residuals: list[Tensor]) -> list[Tensor]:
    """Sum, add and norm the rank's parts, with all-reduces in between; return all results."""
    results = []
    for number, (x, residual) in enumerate(zip(parts, residuals, strict=True)):
        normed, total, summed = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
        weight, arguments = residual[0].contiguous(), ranks.arguments(rank)
        peers.sum_and_norm(x, residual, weight, total, normed, eps=1e-6, unit_offset=True, **arguments)
        results += [normed, total]
        if number % 3 == 0:
            peers.exchange(x, summed, "all-reduce", **arguments)
            results.append(summed)
    return results


@pytest.mark.gpu
def test_two_ranks_on_two_streams_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run at a time and wait for each other, far ahead of the host, and have the same bits."""
    monkeypatch.setattr(peers, "_SPINS", 1 << 22)  # some seconds
    device = torch.device("cuda")
    shapes = [(1, 4096), (32, 4096), (128, 4096), (7, 2048), (256, 4096)] * 12
    first, second, residuals = ([torch.randn(shape, device=device).bfloat16() for shape in shapes] for _ in range(3))
    ranks = Ranks(device)
    ranks.flags.fill_(1 << 30)  # no rank waits while all kernels are compiled and loaded
    for rank, parts in enumerate((first, second)):
        calls(ranks, rank, parts, residuals)
    torch.cuda.synchronize()
    ranks.flags.zero_()
    ranks.counters.zero_()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for rank, parts in ((1, second), (0, first)):
        with torch.cuda.stream(streams[rank]):
            results.append(calls(ranks, rank, parts, residuals))
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    found = iter(results[0])
    for number, residual in enumerate(residuals):
        summed = (first[number].float() + second[number].float()).bfloat16()
        normed, total = fused_rms_norm(summed, residual[0].contiguous(), residual, unit_offset=True)
        # Sums over a row may have another order than those of the separate kernel.
        torch.testing.assert_close(next(found), normed, rtol=2.0**-7, atol=0)
        assert torch.equal(next(found), total), number
        if number % 3 == 0:
            assert torch.equal(next(found), summed), number
