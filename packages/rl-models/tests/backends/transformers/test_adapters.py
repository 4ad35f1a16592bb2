"""Adapters by PEFT: in a mixture of experts with dense MLPs, and with dropout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_layers.model import LoraOptions
from rl_models import Actor, ActorCritic, Batch, Critic, OptimizerOptions
from rl_models.losses import LossTerms


def test_dense_mlps_and_shared_experts_of_a_mixture_are_adapted(tiny: Callable[..., Path]) -> None:
    pytest.importorskip("peft")
    folder = tiny(
        "deepseek", num_key_value_heads=4, first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, moe_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8,
    )  # fmt: skip
    found = []
    for backend in ("parallel", "transformers"):
        actor = Actor.from_pretrained(folder, backend=backend, device="cpu", lora=LoraOptions(rank=2))
        batch = Batch.from_sequences([[1, 2, 3, 4], [5, 6, 7]])
        found.append([actor.update(batch, lambda inputs: LossTerms(-inputs.log_probs)) for _ in range(2)])
        names = {name for name, _ in actor.stream_weights(adapter=True)}
        assert any("layers.0.mlp.gate_proj" in name for name in names)
        assert any("layers.1.mlp.shared_experts.up_proj" in name for name in names)
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        pytest.param("parallel", Actor, marks=pytest.mark.slow),
        ("parallel", ActorCritic),
        ("transformers", Critic),
        pytest.param("parallel", Critic, marks=pytest.mark.slow),
        pytest.param("transformers", Actor, marks=pytest.mark.slow),
        pytest.param("transformers", ActorCritic, marks=pytest.mark.slow),
    ],
)
def test_updates_alone_have_dropout(tiny: Callable[..., Path], backend: str, kind: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    batch = Batch.from_sequences([[1, 2, 3, 4], [5, 6, 7]], response_lengths=[2, 1])
    options = {"backend": backend, "device": "cpu", "optimizer": OptimizerOptions(learning_rate=1e-2)}
    lora = LoraOptions(rank=4, dropout=0.5)
    learned = kind.from_pretrained(tiny("llama"), lora=lora, **options)
    for _ in range(3):
        learned.update(batch, lambda inputs: LossTerms((sum(inputs.outputs.values()) - 1).square()))
    learned.save_training(tmp_path / "training")
    learned.save_adapter(tmp_path / "adapter")
    resumed = kind.from_pretrained(tiny("llama"), lora=lora, **options)
    resumed.load_training(tmp_path / "training")
    sharing = kind.sharing_base(learned, lora=tmp_path / "adapter")
    expected = learned.predict(batch)
    for worker in (resumed, sharing, kind.from_pretrained(tiny("llama"), lora=tmp_path / "adapter", **options)):
        for name, outputs in worker.predict(batch).items():
            assert torch.equal(outputs, expected[name]), name
    base = learned.predict(batch, adapters=False)
    assert all(not torch.allclose(outputs, base[name], atol=1e-3) for name, outputs in expected.items())
    losses = [
        worker.update(batch, lambda inputs: LossTerms(next(iter(inputs.outputs.values()))))
        for worker in (learned, resumed)
    ]
    assert losses[0] == losses[1]
