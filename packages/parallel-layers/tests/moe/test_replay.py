from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from parallel_layers.linear.execution import Placement
from parallel_layers.moe import MoE, MoEConfig, RouterReplay, RoutingContext
from parallel_layers.testing import RankPool

CONFIG = MoEConfig(num_experts=6, top_k=2, intermediate_size=8, shared_intermediate_size=4)


def layers() -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(MoE(8, CONFIG, layer_number=number) for number in (3, 9))


def run(stack: torch.nn.ModuleList, hidden: Tensor, replay: RouterReplay, recompute: bool = False) -> Tensor:
    context = RoutingContext(replay=replay)
    for layer in stack:
        hidden = checkpoint(layer, hidden, context, use_reentrant=False) if recompute else layer(hidden, context)
    return hidden


@pytest.mark.parametrize("recompute", [False, True])
def test_replay_of_another_choice(recompute: bool) -> None:
    """Replayed experts are used, in the forward and in recomputation, and the gradient reaches the router."""
    stack, hidden = layers(), torch.randn(5, 8)
    record = RouterReplay()
    run(stack, hidden, record)
    assert sorted(record.experts) == [3, 9]

    other = RouterReplay({layer: (e + 1) % 6 for layer, e in record.experts.items()}, num_experts=6)
    leaf = hidden.clone().requires_grad_()
    out = run(stack, leaf, other, recompute)
    # Another batch is routed between forward and recomputation, as in an interleaved schedule.
    run(stack, torch.randn(7, 8), RouterReplay())
    out.square().sum().backward()
    assert all(layer.gate.weight.grad.abs().sum() > 0 for layer in stack)

    x = hidden.clone().requires_grad_()
    y = x
    for layer in stack:
        scores = (y @ layer.gate.weight.T).softmax(-1)
        weights = scores.gather(1, other.experts[layer.layer_number])
        weights = weights / weights.sum(1, keepdim=True)
        y = layer.experts(y, other.experts[layer.layer_number], weights) + layer.shared_experts(y)
    torch.testing.assert_close(out, y)
    torch.testing.assert_close(leaf.grad, torch.autograd.grad(y.square().sum(), x)[0])


def test_replaying_what_was_recorded_changes_nothing() -> None:
    stack, hidden, record = layers(), torch.randn(5, 8), RouterReplay()
    expected = run(stack, hidden, record)
    assert torch.equal(run(stack, hidden, record.replaying()), expected)
    again = RouterReplay.from_tensor(record.as_tensor(), [3, 9], num_experts=6)
    assert torch.equal(run(stack, hidden, again), expected)
    assert not again.recording


def test_tokens_left_out_are_routed_afresh() -> None:
    stack, hidden, record = layers(), torch.randn(5, 8), RouterReplay()
    expected = run(stack, hidden, record)
    entries = {layer: experts.clone() for layer, experts in record.experts.items()}
    for experts in entries.values():
        experts[2] = -1
    assert torch.equal(run(stack, hidden, RouterReplay(entries, num_experts=6)), expected)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, 6], r"layer 4, token 2: experts \[1, 6\] name an expert outside 0\.\.5"),
        ([-1, 3], r"layer 4, token 2: experts \[-1, 3\] name an expert outside"),
        ([5, 5], r"layer 4, token 2: experts \[5, 5\] name an expert twice"),
    ],
)
def test_impossible_entries_name_layer_and_token(row: list[int], message: str) -> None:
    experts = torch.tensor([[0, 1], [2, 3], row])
    with pytest.raises(ValueError, match=message):
        RouterReplay({4: experts}, num_experts=6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32])
def test_integers_of_every_size(dtype: torch.dtype) -> None:
    """An engine reports in as few bytes as the number of experts needs: a byte for DeepSeek-V3's 256."""
    experts = torch.tensor([[255, 0], [3, 1]]).to(dtype)
    replay = RouterReplay.from_tensor(experts[:, None], [4], num_experts=256)
    assert replay.select(4, torch.zeros(2, 2, dtype=torch.int64)).tolist() == [[255, 0], [3, 1]]
    with pytest.raises(ValueError, match=r"token 0: experts \[255, 0\] name an expert outside 0\.\.254"):
        RouterReplay({4: experts}, num_experts=255)


def test_layers_of_one_number_are_refused() -> None:
    """The second would overwrite what the first has recorded, and both would replay it."""
    first, second = MoE(8, CONFIG), MoE(8, CONFIG)
    context = RoutingContext(replay=RouterReplay())
    hidden = first(torch.randn(4, 8), context)
    with pytest.raises(ValueError, match="two routers of one batch have the layer number 0"):
        second(hidden, context)
    first(hidden, context)  # once more, as in a recomputation


def test_other_mistakes() -> None:
    experts = torch.tensor([[0, 1], [2, 3]])
    with pytest.raises(ValueError, match="a replay needs num_experts"):
        RouterReplay({4: experts})
    with pytest.raises(ValueError, match=r"must be \[T, k\] integers, not torch.float32"):
        RouterReplay({4: experts.float()}, num_experts=6)
    with pytest.raises(ValueError, match=r"must be \[T, k\] integers, not torch.bool"):
        RouterReplay({4: experts > 0}, num_experts=6)
    with pytest.raises(ValueError, match=r"must be \[T, 1, k\] for layers \[0\]"):
        RouterReplay.from_tensor(torch.zeros(2, 3, 2, dtype=torch.int64), [0], num_experts=6)
    replay = RouterReplay({4: experts}, num_experts=6)
    with pytest.raises(ValueError, match=r"no experts to replay for layer 5; there are entries for \[4\]"):
        replay.select(5, experts)
    with pytest.raises(ValueError, match=r"layer 4: experts to replay have shape \[2, 2\], but tokens 0\.\.2"):
        replay.select(4, torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"have shape \[2, 2\], but tokens 0\.\.0 of 1 with 2 experts"):
        replay.select(4, experts[:1])  # of another batch: its first tokens' experts would be taken
    assert replay.select(4, experts[:1], first_token=1, num_tokens=2).tolist() == [[2, 3]]


def sharded(group: ProcessGroup, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    moe = MoE(8, CONFIG, placement=Placement(group, sequence_parallel=True))
    mine = hidden.chunk(group.size())[group.rank()]
    record = RouterReplay()
    moe(mine, RoutingContext(replay=record))
    shifted = RouterReplay({0: (record.experts[0] + 1) % 6}, num_experts=6)
    return record.experts[0], shifted.experts[0], moe(mine, RoutingContext(replay=shifted))


def test_ranks_with_parts_of_the_tokens_record_and_replay_the_whole(ranks: RankPool) -> None:
    torch.manual_seed(4)
    hidden = torch.randn(6, 8)
    results = ranks.run(sharded, hidden, world=2, timeout=60)
    torch.manual_seed(0)
    moe, record = MoE(8, CONFIG), RouterReplay()
    moe(hidden, RoutingContext(replay=record))
    assert all(torch.equal(recorded, record.experts[0]) for recorded, _, _ in results)
    expected = moe(hidden, RoutingContext(replay=RouterReplay({0: results[0][1]}, num_experts=6)))
    torch.testing.assert_close(torch.cat([out for _, _, out in results]), expected)
