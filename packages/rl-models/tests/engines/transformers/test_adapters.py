"""Adapters by PEFT on a mixture of experts with dense MLPs, whose targets PEFT itself would turn into its experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from parallel_layers.lora import LoraOptions
from rl_models import Actor, Batch
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
        found.append([actor.update(batch, lambda log_probs, *_: LossTerms(-log_probs)) for _ in range(2)])
        names = {name for name, _ in actor.stream_weights(adapter=True)}
        assert any("layers.0.mlp.gate_proj" in name for name in names)
        assert any("layers.1.mlp.shared_experts.up_proj" in name for name in names)
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
