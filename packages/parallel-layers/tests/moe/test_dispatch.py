from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from parallel_layers.moe import GroupedExperts, experts
from parallel_layers.moe.dispatch import Dispatch
from parallel_layers.testing import RankPool


def choices(tokens: int, num_experts: int, top_k: int, seed: int) -> Tensor:
    scores = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(top_k).indices


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 5), st.integers(0, 1000), st.data())
def test_rows_reach_their_experts_and_return(tokens: int, num_experts: int, seed: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    experts = choices(tokens, num_experts, top_k, seed)
    x = torch.arange(tokens, dtype=torch.float64)[:, None].repeat(1, 3).requires_grad_()
    weights = experts.double() + 1
    dispatch = Dispatch.plan(experts, num_experts, None)
    rows, row_weights = dispatch.to_experts(x, weights)
    assert dispatch.counts.tolist() == experts.flatten().bincount(minlength=num_experts).tolist()
    at = torch.arange(num_experts).repeat_interleave(dispatch.counts)
    assert torch.equal(row_weights, at.double() + 1)
    assert all(int(expert) in experts[int(row[0])] for expert, row in zip(at, rows, strict=True))
    out = dispatch.to_tokens(rows * row_weights[:, None])
    torch.testing.assert_close(out, x * weights.sum(1, keepdim=True))
    assert torch.autograd.gradcheck(lambda y: dispatch.to_tokens(dispatch.to_experts(y, weights)[0].square()), x)


def exchanged(group: ProcessGroup, seed: int) -> tuple[Tensor, Tensor]:
    rank, size = group.rank(), group.size()
    tokens, num_experts = [3, 0, 8, 1][rank], 2 * size
    experts = choices(tokens, num_experts, 2, seed + rank)
    x = (torch.arange(tokens) + 100 * rank).double()[:, None].repeat(1, 2).requires_grad_()
    dispatch = Dispatch.plan(experts, num_experts, group)
    rows, weights = dispatch.to_experts(x, experts.double())
    # A row's weight is the number of its expert: this rank has 2 * rank and the next.
    assert torch.equal(weights, (2 * rank + torch.arange(2)).repeat_interleave(dispatch.counts).double())
    out = dispatch.to_tokens(rows * weights[:, None])
    torch.testing.assert_close(out, x * experts.sum(1, keepdim=True))
    out.sum().backward()
    torch.testing.assert_close(x.grad, experts.sum(1, keepdim=True).double().expand(tokens, 2))
    return x.detach(), rows.detach()


def test_rows_travel_between_ranks(ranks: RankPool) -> None:
    results = ranks.run(exchanged, 0, world=4, timeout=60)
    sent = torch.cat([x for x, _ in results]).repeat_interleave(2, 0)
    arrived = torch.cat([rows for _, rows in results])
    assert torch.equal(sent.sort(0).values, arrived.sort(0).values)


class Reads(TorchFunctionMode):
    """Notes what reads a tensor's value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.nonzero):
            self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


def reads_of_experts(group: ProcessGroup) -> list[str]:
    """Return the reads of a forward and backward, without the bounds of grouped products that CUDA leaves unread."""
    layer = GroupedExperts(8, 6, 4, bias=True, expert_group=group)
    x, weights = torch.randn(5, 8, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    bounds = experts._runs

    def unseen(*arguments: Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return bounds(*arguments)

    with patch.object(experts, "_runs", unseen), Reads() as reads:
        layer(x, choices(5, 4, 2, seed=group.rank()), weights).sum().backward()
    assert x.grad is not None
    return reads.seen


def test_a_layer_reads_once_how_many_rows_each_rank_sends(ranks: RankPool) -> None:
    assert ranks.run(reads_of_experts, world=2) == [["tolist"], ["tolist"]]
