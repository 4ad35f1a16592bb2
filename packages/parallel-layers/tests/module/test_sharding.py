"""`load_full_`: a sharded module from the tensors of a whole one, buffers too, or an error and nothing changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import ColumnParallelLinear, ParallelMLP
from parallel_layers.linear.execution import Placement
from parallel_layers.module.sharding import load_full_
from parallel_layers.moe import MoE, MoEConfig
from parallel_layers.testing import RankPool

EXPERTS = MoEConfig(num_experts=4, top_k=2, intermediate_size=8, scoring="sigmoid", correction_bias=True)


def build(kind: str, group: ProcessGroup | None) -> nn.Module:
    """Modules with persistent buffers."""
    if kind == "experts":
        return MoE(16, EXPERTS, placement=Placement(group))
    return ParallelMLP(16, 8, gated=False, activation="xielu", placement=Placement(group))


def whole_state(kind: str) -> dict[str, Tensor]:
    state = build(kind, None).state_dict()
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(value.shape, generator=generator) for name, value in state.items()}


def load(group: ProcessGroup, kind: str) -> bool:
    module, whole, state = build(kind, group), build(kind, None), whole_state(kind)
    load_full_(module, state)
    whole.load_state_dict(state)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(module(x), whole(x))
    return all(torch.equal(buffer, state[name]) for name, buffer in module.named_buffers())


@pytest.mark.parametrize("kind", ["experts", "xielu"])
def test_a_state_dict_with_buffers(ranks: RankPool, kind: str) -> None:
    assert ranks.run(load, kind, world=2) == [True, True]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nope.weight": torch.zeros(1)}, r"Sequential has no nope.weight; it has 0.weight, 0.bias"),
        ({"0.nope": torch.zeros(1)}, r"Sequential has no 0.nope; it has"),
        ({"0.bias": torch.zeros(3)}, r"0.bias has shape \(3,\), the full tensor \(2,\)"),
    ],
)
def test_a_mistake_is_named_before_anything_is_copied(wrong: dict[str, Tensor], message: str) -> None:
    model = nn.Sequential(ColumnParallelLinear(3, 2, bias=True))
    before = model[0].weight.clone()
    with pytest.raises(ValueError, match=message):
        load_full_(model, {"0.weight": torch.zeros(2, 3), **wrong})
    assert torch.equal(model[0].weight, before)
