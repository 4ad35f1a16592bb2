"""Initial parameters: functions of (seed, name), whatever the grid."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.attention import LatentConfig
from parallel_layers.head.embedding import VocabParallelEmbedding
from parallel_layers.linear.execution import Placement
from parallel_layers.linear.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from parallel_layers.mlp.layer import ParallelMLP
from parallel_layers.model.decoder import DecoderConfig, DecoderLayer
from parallel_layers.module.initialization import as_linear, draw, initialize_, normal
from parallel_layers.module.sharding import blocks_of, full_shape
from parallel_layers.moe import MoEConfig
from parallel_layers.testing import RankPool

EXPERTS = MoEConfig(
    num_experts=4, top_k=2, intermediate_size=8, shared_intermediate_size=8, router_bias=True,
    correction_bias=True,
)  # fmt: skip
ORDINARY = DecoderConfig(
    hidden_size=16, num_heads=4, num_kv_heads=2, intermediate_size=8, attention_bias=True, attention_sinks=True,
    qk_norm="full", moe=replace(EXPERTS, expert_bias=True),
)  # fmt: skip
LATENT = DecoderConfig(
    hidden_size=16, num_heads=4, num_kv_heads=4, intermediate_size=8,
    latent=LatentConfig(kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3, q_lora_rank=5),
)  # fmt: skip


def build(group: ProcessGroup | None, seed: int | None, expert_group: ProcessGroup | None = None) -> nn.ModuleDict:
    torch.manual_seed(5)
    model = nn.ModuleDict(
        {
            "embed": VocabParallelEmbedding(11, 16, group=group),
            "qkv": QKVParallelLinear(16, 8, 2, 2, bias=True, placement=Placement(group)),
            "gate_up": MergedColumnParallelLinear(16, [8, 20], placement=Placement(group)),
            "up": ColumnParallelLinear(16, 12, placement=Placement(group)),
            "down": RowParallelLinear(12, 16, bias=True, placement=Placement(group)),
            "norm": nn.LayerNorm(16),
            "ordinary": DecoderLayer(ORDINARY, placement=Placement(group), expert_group=expert_group),
            "latent": DecoderLayer(LATENT, placement=Placement(group)),
        }
    )
    if seed is not None:
        initialize_(model, seed)
    return model


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def parts_agree(group: ProcessGroup, seed: int | None, full: dict[str, Tensor], by_expert: bool) -> int:
    """How many parameters of this rank are bitwise its parts of the full ones; padding is zero."""
    model = build(None, seed, group) if by_expert else build(group, seed)
    equal = 0
    for path, owner in model.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            assert full_shape(owner, name) == tuple(full[f"{path}.{name}"].shape)
            expected = torch.zeros_like(parameter)
            for local, where in blocks_of(owner, name):
                expected[local] = full[f"{path}.{name}"][where]
            equal += torch.equal(parameter, expected)
    return equal


@pytest.mark.parametrize(
    ("world", "by_expert", "seed"), [(1, False, 3), (2, False, None), (4, False, 3), (4, False, None), (2, True, 3)]
)
def test_bitwise_equal_at_every_group_size(ranks: RankPool, world: int, by_expert: bool, seed: int | None) -> None:
    full = full_parameters(build(None, seed))
    assert ranks.run(parts_agree, seed, full, by_expert, world=world) == [len(full)] * world


def test_a_seed_gives_the_weights_that_it_always_gave() -> None:
    """On a corner of four tiles of the second matrix."""
    weights = draw([2, 300, 2000], [(1, 2), (127, 129), (1023, 1025)], 7, "layers.0.weight", as_linear(4))
    assert weights.tolist() == [
        [[-0.11271661520004272, -0.1204192042350769], [0.1515260934829712, 0.48038482666015625]]
    ]


def test_values_depend_on_seed_name_and_prefix() -> None:
    def weight(seed: int, name: str, prefix: str = "") -> Tensor:
        model = nn.ModuleDict({name: nn.Linear(8, 8)})
        initialize_(model, seed, prefix=prefix)
        return model[name].weight.detach()

    assert torch.equal(weight(1, "a"), weight(1, "a"))
    nested = nn.ModuleDict({"layers": nn.ModuleDict({"1": nn.Linear(8, 8)})})
    initialize_(nested, 1)
    assert torch.equal(weight(1, "1", "layers."), nested.get_parameter("layers.1.weight"))
    for other in (weight(2, "a"), weight(1, "b"), weight(1, "a", "x.")):
        assert not torch.equal(weight(1, "a"), other)


def test_what_is_left_alone() -> None:
    model = build(None, 1)
    assert model["norm"].weight.eq(1).all()
    assert model["qkv"].bias.eq(0).all()


def test_tied_parameters_are_drawn_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    alone = nn.Sequential(nn.Linear(4, 4, bias=False))
    initialize_(model, 1)
    initialize_(alone, 1)
    assert torch.equal(model[0].weight, alone[0].weight)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_rectangle_is_a_part_of_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(300,), (1100,), (130, 70), (260, 1030), (3, 140, 9)]))
    ranges = []
    for size in shape:
        start = data.draw(st.integers(0, size))
        ranges.append((start, data.draw(st.integers(start, size))))
    whole = draw(shape, [(0, size) for size in shape], 1, "w", normal(0.02))
    part = draw(shape, ranges, 1, "w", normal(0.02))
    assert torch.equal(part, whole[tuple(slice(*r) for r in ranges)])


def test_distributions() -> None:
    shape, whole = (512, 2048), [(0, 512), (0, 2048)]
    gaussian = draw(shape, whole, 0, "w", normal(0.02))
    assert gaussian.std().item() == pytest.approx(0.02, rel=5e-3)
    assert abs(gaussian.mean().item()) < 1e-4
    flat = draw(shape, whole, 0, "w", as_linear(4))
    assert flat.abs().max() <= 0.5
    assert flat.std().item() == pytest.approx(0.5 / 3**0.5, rel=5e-3)
    tiles = gaussian.unfold(0, 128, 128).unfold(1, 1024, 1024).reshape(-1, 128 * 1024)
    assert (torch.corrcoef(tiles) - torch.eye(len(tiles))).abs().max() < 0.02


def materialised(model: nn.Module) -> nn.Module:
    """A model from the meta device, with nothing but NaN in it: what `to_empty` leaves can be anything."""
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.fill_(torch.nan)
    return model


def test_a_model_from_the_meta_device_is_like_any_other() -> None:
    with torch.device("meta"):
        model = build(None, 1)
        model["xielu"] = ParallelMLP(16, 8, activation="xielu", gated=False)
    expected = build(None, None)
    expected["xielu"] = ParallelMLP(16, 8, activation="xielu", gated=False)
    initialize_(expected, 1)
    assert all(p.is_meta for p in model.parameters())
    model = materialised(model)
    before = torch.get_rng_state()
    initialize_(model, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", [1, None])
def test_numbers_do_not_depend_on_torchs_default_dtype(dtype: torch.dtype, seed: int | None) -> None:
    def weight() -> Tensor:
        torch.manual_seed(0)
        layer = ColumnParallelLinear(12, 8, dtype=torch.float32)
        if seed is not None:
            initialize_(layer, seed)
        return layer.weight.detach()

    expected = weight()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(weight(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.gpu
def test_numbers_do_not_depend_on_torchs_default_device() -> None:
    with torch.device("cuda"):
        model = build(None, 1)
    torch.testing.assert_close(
        {name: p.cpu() for name, p in full_parameters(model).items()}, full_parameters(build(None, 1)), rtol=0, atol=0
    )
