"""Actors and critics with low-rank adapters on the native models; `tests/test_lora.py` compares them with PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch.distributed import ProcessGroup

import ckpt
from parallel_layers import ParallelDims
from parallel_layers.linear import LowRank
from parallel_layers.model import LoraOptions
from parallel_layers.testing import RankPool
from parallel_models.engine import describe
from rl_models import Actor, ActorCritic, Batch, Critic, LossInputs, OptimizerOptions
from rl_models.losses import LossTerms

LORA = LoraOptions(rank=2, alpha=4, seed=1)
OPTIMIZER = OptimizerOptions(learning_rate=1e-2)


def batch_of(rank: int = 0, size: int = 1) -> Batch:
    sequences = [torch.arange(length) % 61 for length in (5, 7, 4, 6)]
    return Batch.from_sequences(sequences, response_lengths=[3, 4, 2, 4]).select(list(range(rank, 4, size)))


def policy_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(-inputs.log_probs)


def learned(actor: Actor, steps: int = 1) -> Actor:
    for _ in range(steps):
        actor.update(batch_of(actor.grid.rank("dp"), actor.grid.dims.dp), policy_loss)
    return actor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_has_no_gradients_and_no_state(tiny: Callable[..., Path], dtype: torch.dtype) -> None:
    actor = Actor.from_pretrained(tiny("llama"), lora=LORA, optimizer=OPTIMIZER, dtype=dtype)
    model = actor.engine.module
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    grads = set()
    step = actor.optimizer.step

    def look(rate: float) -> float:
        grads.update(name for name, parameter in model.named_parameters() if parameter.grad is not None)
        return step(rate)

    actor.optimizer.step = look  # type: ignore[method-assign]
    learned(actor, 2)
    adapters = {name for name in before if ".lora." in name}
    assert grads == adapters
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == adapters
    count = sum(before[name].numel() for name in adapters)
    held = sum(tensor.numel() for tensor in actor.optimizer.tensors() if tensor.numel() > 1)
    assert held == count * (2 if dtype == torch.float32 else 3)


def test_the_reference_is_the_model_without_adapters(tiny: Callable[..., Path]) -> None:
    actor, reference = (Actor.from_pretrained(tiny("llama"), optimizer=OPTIMIZER, **o) for o in ({"lora": LORA}, {}))
    batch = batch_of()
    expected = reference.log_probs(batch).log_probs
    assert torch.equal(actor.log_probs(batch).log_probs, expected)  # B is zero at first
    learned(actor, 3)
    assert torch.equal(actor.log_probs(batch, adapters=False).log_probs, expected)
    assert not torch.allclose(actor.log_probs(batch).log_probs, expected, atol=1e-3)
    drawn = [actor.generate([[1, 2, 3]], max_new_tokens=5, seed=1, adapters=adapters) for adapters in (False, True)]
    ours = reference.generate([[1, 2, 3]], max_new_tokens=5, seed=1)
    assert torch.equal(drawn[0].tokens, ours.tokens)
    assert torch.equal(drawn[0]["log_probs"], ours["log_probs"])
    assert not torch.equal(drawn[1]["log_probs"], ours["log_probs"])
    with pytest.raises(ValueError, match=r"has no adapters; load it with from_pretrained\(\.\.\., lora="):
        reference.log_probs(batch, adapters=False)


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("mixture", marks=pytest.mark.slow), pytest.param("deepseek", marks=pytest.mark.slow)]
)
def test_generation_and_streams_have_the_adapters(tiny: Callable[..., Path], name: str, tmp_path: Path) -> None:
    experts = ["experts.gate_up_proj", "experts.down_proj"] * (name == "mixture")
    more = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "v_head_dim": 8,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "moe_intermediate_size": 16} if name == "deepseek" else {}  # fmt: skip
    folder = tiny(name, **more)
    lora = LoraOptions(rank=2, targets=["all-linear", *experts])
    actor = learned(Actor.from_pretrained(folder, lora=lora, optimizer=OPTIMIZER), 2)
    batch = actor.generate([[1, 2, 3], [4, 5]], max_new_tokens=5, seed=1)
    ours = actor.log_probs(batch).log_probs
    torch.testing.assert_close(ours[batch.mask], batch["log_probs"][batch.mask], atol=1e-5, rtol=1e-4)
    actor.save_pretrained(tmp_path / "merged")
    merged = Actor.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged.log_probs(batch).log_probs, ours, atol=1e-5, rtol=1e-4)
    for (key, streamed), (_, saved) in zip(actor.stream_weights(), merged.stream_weights(), strict=True):
        assert torch.equal(streamed, saved), key


@pytest.mark.parametrize("kind", [Critic, ActorCritic])
def test_a_value_head_is_trained_and_saved_with_the_adapters(
    tiny: Callable[..., Path], kind: Any, tmp_path: Path
) -> None:
    folder = tiny("critic") if kind is Critic else tiny("llama")
    model = kind.from_pretrained(folder, lora=LORA, optimizer=OPTIMIZER)

    def loss(inputs: LossInputs) -> LossTerms:
        return LossTerms((inputs.values - 1).square())

    batch = batch_of()
    before = model.values(batch)
    model.update(batch, loss)
    model.update(batch, loss)
    assert not torch.allclose(model.values(batch), before)
    model.save_adapter(tmp_path / "adapter")
    again = kind.from_pretrained(folder, lora=tmp_path / "adapter")
    assert torch.equal(again.values(batch), model.values(batch))


def test_dropout_goes_on_in_a_resumed_run(tiny: Callable[..., Path], tmp_path: Path) -> None:
    def make() -> Actor:
        lora = LoraOptions(rank=2, dropout=0.5, seed=3)
        return Actor.from_pretrained(tiny("llama"), lora=lora, optimizer=OPTIMIZER)

    actor, resumed = make(), make()
    for _ in range(2):
        actor.update(batch_of(), policy_loss)
    actor.save_training(tmp_path)
    resumed.load_training(tmp_path)
    for worker in (actor, resumed):
        worker.update(batch_of(), policy_loss)
    assert torch.equal(actor.log_probs(batch_of()).log_probs, resumed.log_probs(batch_of()).log_probs)


def dropped(group: ProcessGroup | None, folder: Path, dims: ParallelDims) -> float:
    lora = LoraOptions(rank=2, dropout=0.5, seed=3)
    actor = Actor.from_pretrained(
        folder, dims=dims, mesh=mesh_of(dims), device="cpu", lora=lora, optimizer=OPTIMIZER, recompute="full"
    )
    assert all(torch.equal(actor.log_probs(batch_of())[0], actor.log_probs(batch_of())[0]) for _ in range(2))
    learned(actor, 2)
    return actor.update(batch_of(), policy_loss)["grad_norm"]


@pytest.mark.slow
def test_dropout_is_alike_at_every_tp_and_recomputed(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    expected = dropped(None, folder, ParallelDims())
    assert ranks.run(dropped, folder, ParallelDims(tp=2), world=2) == pytest.approx([expected] * 2, rel=1e-4)


def of_one_layer(group: ProcessGroup, folder: Path, layer: int) -> list[str]:
    dims = ParallelDims(pp=2)
    lora = LoraOptions(rank=2, targets=rf"model\.layers\.{layer}\.self_attn\.[qv]_proj")
    actor = Actor.from_pretrained(folder, dims=dims, mesh=mesh_of(dims), device="cpu", lora=lora, optimizer=OPTIMIZER)
    learned(actor, 2)
    adapters = {name: m for name, m in actor.engine.module.named_modules() if isinstance(m, LowRank)}
    return [name for name, module in adapters.items() if module.B.any()]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1])
def test_a_stage_may_lack_adapters(ranks: RankPool, tiny: Callable[..., Path], layer: int) -> None:
    found = [[], []]
    found[layer] = [f"model.layers.{layer}.self_attn.qkv_proj.lora"]
    assert ranks.run(of_one_layer, tiny("llama"), layer, world=2) == found


def tied_on(group: ProcessGroup | None, folder: Path, dims: ParallelDims) -> float:
    actor = Actor.from_pretrained(folder, dims=dims, mesh=mesh_of(dims), device="cpu", lora=LORA, optimizer=OPTIMIZER)
    learned(actor, 2)
    return actor.update(batch_of(actor.grid.rank("dp"), dims.dp), policy_loss)["grad_norm"]


@pytest.mark.slow
def test_tied_embeddings_may_be_part_of_the_frozen_base(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    folder = tiny("qwen2")
    expected = tied_on(None, folder, ParallelDims())
    for dims in (ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(dp=2)):
        assert ranks.run(tied_on, folder, dims, world=2) == pytest.approx([expected] * 2, rel=1e-4)


def test_mistakes_are_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny("llama")
    for kwargs, text in (
        (
            {"lora": LoraOptions(targets=["wq"])},
            "target 'wq' of the adapters matches no layer; there are .*self_attn.q_proj",
        ),
        ({"lora": LORA, "tp_invariant": True}, "tp_invariant=True excludes lora"),
        ({"lora": tmp_path}, "has no adapter_config.json"),
    ):
        with pytest.raises(ValueError, match=text):
            Actor.from_pretrained(folder, **kwargs)
    with pytest.raises(ValueError, match=r"model.embed_tokens is tied to the head"):
        Actor.from_pretrained(tiny("qwen2"), lora=LoraOptions(targets=["embed_tokens"]))
    actor = Actor.from_pretrained(folder, lora=LORA)
    actor.save_adapter(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(file.read_text().replace('"bias": "none"', '"bias": "none", "use_dora": true'))
    with pytest.raises(ValueError, match=r"use_dora=True is not read; use plain LoRA \(False\)"):
        Actor.from_pretrained(folder, lora=tmp_path / "adapter")


def test_the_base_is_named_by_its_absolute_path(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("llama")
    monkeypatch.chdir(folder.parent)
    layout = describe(LoraOptions(2), ckpt.layout_for(folder), folder.name).layout
    assert layout.settings["base_model_name_or_path"] == str(folder)
