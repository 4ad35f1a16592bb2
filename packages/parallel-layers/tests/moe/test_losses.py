from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from parallel_layers import PackedSequence
from parallel_layers.linear.execution import Placement
from parallel_layers.moe import (
    BatchTotals,
    MoE,
    MoEConfig,
    RoutingContext,
    attach_loss,
    load_balancing_loss,
    router_z_loss,
    sequence_balance_loss,
)
from parallel_layers.testing import RankPool

EXPERTS, TOP_K = 6, 2
ALL = torch.ones(13, dtype=torch.bool)


def routed(tokens: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    logits = torch.randn(tokens, EXPERTS, dtype=torch.float64)
    return logits, logits.topk(TOP_K).indices


@pytest.mark.parametrize("padding", [0, 4])
def test_balance_loss_equals_transformers(padding: int) -> None:
    logits, experts = routed(13)
    mask = torch.arange(13) < 13 - padding
    losses = []
    for compute in (
        lambda x: load_balancing_loss(x.softmax(-1), experts, mask),
        lambda x: load_balancing_loss_func((x,), EXPERTS, TOP_K, mask[None] if padding else None),
    ):
        leaf = logits.float().requires_grad_()
        loss = compute(leaf)
        losses.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    torch.testing.assert_close(losses[0], losses[1])


def test_sequence_loss_is_the_mean_over_sequences() -> None:
    logits, experts = routed(12)
    probs = logits.softmax(-1)
    segments = torch.tensor([0] * 5 + [1] + [3] * 4 + [-1] * 2)  # sequence 2 is empty
    expected = []
    for sequence in (0, 1, 3):
        rows = segments == sequence
        share = torch.zeros(int(rows.sum()), EXPERTS, dtype=torch.float64).scatter(1, experts[rows], 1.0).mean(0)
        expected.append((EXPERTS / TOP_K * share * probs[rows].mean(0)).sum())
    torch.testing.assert_close(sequence_balance_loss(probs, experts, segments, 4), torch.stack(expected).mean())


def test_balanced_routing_gives_k_and_one() -> None:
    probs = torch.full((6, EXPERTS), 1 / EXPERTS)
    experts = torch.tensor([[0, 1], [2, 3], [4, 5]] * 2)
    torch.testing.assert_close(load_balancing_loss(probs, experts, ALL[:6]), torch.tensor(float(TOP_K)))
    segments = torch.tensor([0, 0, 0, 1, 1, 1])
    torch.testing.assert_close(sequence_balance_loss(probs, experts, segments, 2), torch.tensor(1.0))


def test_z_loss() -> None:
    logits, _ = routed(7)
    mask = torch.tensor([True] * 5 + [False] * 2)
    torch.testing.assert_close(router_z_loss(logits, mask), logits[:5].logsumexp(-1).square().mean())
    assert router_z_loss(logits, ~ALL[:7]) == 0


def test_attached_loss_adds_its_gradient() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    attach_loss(x, y.square().sum(), 0.5).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))
    assert torch.equal(y.grad, y.detach())


CONFIG = MoEConfig(
    num_experts=EXPERTS, top_k=TOP_K, intermediate_size=8, balance_loss=0.3, sequence_balance_loss=0.2, z_loss=0.1
)


def packed() -> PackedSequence:
    return PackedSequence.from_sequences([torch.arange(5), torch.arange(3), torch.arange(2)], multiple_of=4)


def explicit(hidden: Tensor) -> tuple[Tensor, dict[str, Tensor], MoE]:
    """Loss computed in the open on the tokens that are not padding; gradients left in the returned layer."""
    torch.manual_seed(1)
    moe = MoE(8, CONFIG)
    plain = MoE(8, MoEConfig(num_experts=EXPERTS, top_k=TOP_K, intermediate_size=8))
    plain.load_state_dict(moe.state_dict())
    routing = plain.gate(hidden[:10])
    probs = routing.logits.softmax(-1)
    segments = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    losses = {
        "balance_loss": load_balancing_loss(probs, routing.experts, ALL[:10]),
        "sequence_balance_loss": sequence_balance_loss(probs, routing.experts, segments, 3),
        "z_loss": router_z_loss(routing.logits, ALL[:10]),
    }
    total = sum(getattr(CONFIG, name) * loss for name, loss in losses.items())
    (plain(hidden).square().sum() + total).backward()
    return routing.experts, losses, plain


@pytest.mark.parametrize("fill", [0.0, 100.0])
def test_layer_adds_the_losses_and_ignores_padding(fill: float) -> None:
    torch.manual_seed(2)
    hidden = torch.randn(12, 8)
    hidden[10:] = fill
    experts, losses, plain = explicit(hidden)
    torch.manual_seed(1)
    moe = MoE(8, CONFIG, layer_number=7)
    context = RoutingContext.of(packed())
    moe(hidden, context).square().sum().backward()
    torch.testing.assert_close(context.losses, {7: {name: loss.detach() for name, loss in losses.items()}})
    assert torch.equal(context.loads[7], experts.flatten().bincount(minlength=EXPERTS).float())
    torch.testing.assert_close(moe.gate.weight.grad, plain.gate.weight.grad)


def layer_on_ranks(group: ProcessGroup, sequence_parallel: bool, hidden: Tensor) -> tuple[RoutingContext, Tensor]:
    torch.manual_seed(1)
    moe = MoE(8, CONFIG, placement=Placement(group, sequence_parallel))
    context = RoutingContext.of(packed())
    mine = hidden.chunk(group.size())[group.rank()] if sequence_parallel else hidden
    moe(mine, context).square().sum().backward()
    context.replay = None
    return context, moe.gate.weight.grad


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_losses_are_those_of_the_whole_pack(ranks: RankPool, sequence_parallel: bool) -> None:
    torch.manual_seed(2)
    hidden = torch.randn(12, 8)
    experts, losses, plain = explicit(hidden)
    for context, gradient in ranks.run(layer_on_ranks, sequence_parallel, hidden, world=2, timeout=60):
        torch.testing.assert_close(context.losses[0], {name: loss.detach() for name, loss in losses.items()})
        assert torch.equal(context.loads[0], experts.flatten().bincount(minlength=EXPERTS).float())
        torch.testing.assert_close(gradient, plain.gate.weight.grad, rtol=1e-5, atol=1e-5)


def shares(hidden: Tensor, contexts: list[RoutingContext], parts: list[slice]) -> tuple[dict[str, float], Tensor]:
    """The losses of a layer on parts of the tokens, added up, and the gradient that they alone give the router."""
    torch.manual_seed(1)
    moe = MoE(8, CONFIG)
    for context, part in zip(contexts, parts, strict=True):
        (0 * moe(hidden[part], context)).sum().backward()
    return {name: sum(context.losses[0][name] for context in contexts) for name in contexts[0].losses[0]}, (
        moe.gate.weight.grad
    )


def whole() -> tuple[Tensor, dict[str, float], Tensor, BatchTotals]:
    """Twelve tokens of which the last two are padding: losses, gradient and totals when they are one pack."""
    torch.manual_seed(2)
    hidden, context = torch.randn(12, 8), RoutingContext.of(packed())
    losses, gradient = shares(hidden, [context], [slice(12)])
    totals = BatchTotals(num_tokens=torch.tensor(10), num_sequences=torch.tensor(3), loads=context.loads)
    return hidden, losses, gradient, totals


def test_shares_of_micro_batches_add_up() -> None:
    hidden, expected, gradient, totals = whole()
    packs = [[torch.arange(5)], [torch.arange(3), torch.arange(2)]]
    contexts = [RoutingContext.of(PackedSequence.from_sequences(rows), totals=totals) for rows in packs]
    # A pack of padding alone, as a rank has that has run out of sequences.
    contexts.append(RoutingContext(segments=torch.tensor([-1]), num_segments=0, totals=totals))
    losses, ours = shares(hidden, contexts, [slice(5), slice(5, 10), slice(10, 11)])
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(ours, gradient)


def share_of_context_parallel_rank(group: ProcessGroup) -> tuple[dict[str, float], Tensor]:
    hidden, _, _, totals = whole()
    mine = slice(6 * group.rank(), 6 * group.rank() + 6)  # the second sequence lies on both ranks
    context = RoutingContext.of(packed(), totals=replace(totals, context_group=group))
    context.segments = context.segments[mine]
    return shares(hidden, [context], [mine])


def test_shares_of_context_parallel_ranks_add_up(ranks: RankPool) -> None:
    _, expected, gradient, _ = whole()
    results = ranks.run(share_of_context_parallel_rank, world=2)
    losses = {name: sum(result[0][name] for result in results) for name in expected}
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(sum(result[1] for result in results), gradient)


def test_totals_without_a_layers_loads_are_refused() -> None:
    totals = BatchTotals(num_tokens=torch.tensor(5), num_sequences=torch.tensor(1), loads={4: torch.zeros(EXPERTS)})
    context = RoutingContext.of(PackedSequence.from_sequences([torch.arange(5)]), totals=totals)
    with pytest.raises(ValueError, match=r"no loads of layer 0, which its balance_loss needs; .* of \[4\]"):
        MoE(8, CONFIG)(torch.zeros(5, 8), context)


def test_segments_of_another_length_are_refused() -> None:
    moe = MoE(8, CONFIG)
    with pytest.raises(ValueError, match="segments have 12 tokens, but 1 ranks route 5 each"):
        moe(torch.zeros(5, 8), RoutingContext.of(packed()))
