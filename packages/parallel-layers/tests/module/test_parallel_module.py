"""Copies of layers, evaluation, and layers under torch.autocast: what a model is put through besides training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import DecoderConfig, DecoderLayer, RotaryEmbedding, VocabParallelEmbedding, clip_grad_norm_
from parallel_layers.attention.config import LatentConfig
from parallel_layers.linear.execution import Placement
from parallel_layers.moe import MoEConfig
from parallel_layers.testing import RankPool

HIDDEN, TOKENS = 16, 8
EXPERTS = MoEConfig(
    num_experts=4, top_k=2, intermediate_size=8, shared_intermediate_size=8, shared_expert_gate=True, expert_bias=True
)
CONFIGS = {
    "ordinary": DecoderConfig(
        hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, intermediate_size=8, qk_norm="full", attention_sinks=True
    ),
    "xielu": DecoderConfig(
        hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, intermediate_size=8, qk_norm="head", gated_mlp=False,
        activation="xielu",
    ),
    "latent": DecoderConfig(
        hidden_size=HIDDEN, num_heads=4, num_kv_heads=4, intermediate_size=8,
        latent=LatentConfig(kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=3, q_lora_rank=5),
    ),
    "experts": DecoderConfig(hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, intermediate_size=8, moe=EXPERTS),
}  # fmt: skip


class Model(torch.nn.Module):
    def __init__(self, name: str, group: ProcessGroup | None, context_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(11, HIDDEN, group=group, sequence_parallel=True)
        self.layer = DecoderLayer(
            CONFIGS[name], placement=Placement(group, sequence_parallel=True), context_group=context_group
        )
        self.rotary = RotaryEmbedding(4)

    def forward(self, tokens: int = TOKENS) -> Tensor:
        bounds = torch.tensor([0, 3, tokens], dtype=torch.int32)
        return self.layer(self.embed(torch.arange(tokens) % 11), self.rotary(torch.arange(tokens)), bounds, tokens)


def step(model: Model, group: ProcessGroup | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    out = model()
    out.square().sum().backward()
    norm = clip_grad_norm_(model, 1.0, groups=[group])
    return out.detach(), norm, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def copied(group: ProcessGroup, name: str) -> None:
    model = Model(name, group)
    twin = copy.deepcopy(model)
    assert twin.embed.group is group
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}
    torch.testing.assert_close(step(twin, group), step(model, group), rtol=0, atol=0)
    assert {type(module) for module in twin.modules()} == {type(module) for module in model.modules()}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_copy_works_over_the_same_group(ranks: RankPool, name: str) -> None:
    """A reference policy, or a moving average."""
    ranks.run(copied, name, world=2)


def copied_over_contexts(group: ProcessGroup) -> None:
    model = Model("ordinary", None, group)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS), model(TOKENS))


def test_a_copy_shares_the_context_group(ranks: RankPool) -> None:
    ranks.run(copied_over_contexts, world=2)


def trained_and_evaluated(group: ProcessGroup | None, name: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model(name, group)
    outs = [model().detach()]
    model.eval()
    with torch.no_grad():
        outs.append(model())
    with torch.inference_mode():
        outs.append(model().clone())
    return outs


@pytest.mark.parametrize("name", CONFIGS)
def test_evaluation_is_bitwise_training(ranks: RankPool, name: str) -> None:
    for results in ([trained_and_evaluated(None, name)], ranks.run(trained_and_evaluated, name, world=2)):
        for trained, *evaluated in results:
            assert all(torch.equal(out, trained) for out in evaluated)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_holds_no_rotary_table(name: str) -> None:
    """A model has one, and gives every layer the same; a layer that is given none does not rotate."""
    model = Model(name, None)
    assert [module for module in model.modules() if isinstance(module, RotaryEmbedding)] == [model.rotary]
    x, bounds = torch.randn(TOKENS, HIDDEN), torch.tensor([0, 3, TOKENS], dtype=torch.int32)
    still = model.rotary(torch.zeros(TOKENS, dtype=torch.int64))
    unrotated = model.layer(x, None, bounds, TOKENS)
    torch.testing.assert_close(unrotated, model.layer(x, still, bounds, TOKENS), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(unrotated, model.layer(x, model.rotary(torch.arange(TOKENS)), bounds, TOKENS))


def autocast_gradients(group: ProcessGroup | None, name: str, *, enabled: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Model(name, group)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        out = model()
    out.float().square().sum().backward()
    return {"out": out.detach().float()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_autocast_rounds_products_alone(ranks: RankPool, name: str) -> None:
    """A decoder of fp32 parameters under autocast to bf16: gradients in fp32, and near those without it."""
    for group_of in (
        lambda **k: [autocast_gradients(None, name, **k)],
        lambda **k: ranks.run(autocast_gradients, name, world=2, **k),
    ):
        for rounded, exact in zip(group_of(enabled=True), group_of(enabled=False), strict=True):
            assert rounded.keys() == exact.keys()
            for key, value in exact.items():
                assert rounded[key].dtype == torch.float32
                error = (rounded[key] - value).abs().max() / value.abs().max().clamp(min=1e-3)
                assert error < 0.05, f"{key}: {error}"
