"""Models with recurrent layers in the real vLLM: its log-probs are the actor's, before and after weight syncs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from parallel_models import SamplingOptions
from rl_models import Actor
from rl_train.engines import VllmEngine

pytestmark = pytest.mark.vllm

PROMPTS = [[1, 4], [3, 5, 6], [9] * 10]
COMMON = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}
COMMON |= {"num_attention_heads": 2, "num_key_value_heads": 1}
MODELS: dict[str, dict[str, Any]] = {
    # Mamba-2 and attention, each with experts, which vLLM's CPU build packs.
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48}
    | {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Without experts, which this build takes with a gate alone. vLLM has no least step: 0.001 gives an error of 3e-3.
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "head_dim": 32, "n_groups": 2}
    | {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "time_step_min": 1e-9},
}


@pytest.mark.parametrize("model_type", ["granitemoehybrid", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_log_probs_are_the_actor_s(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **COMMON, **MODELS[model_type], initializer_range=0.2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    actor = Actor.from_pretrained(tmp_path, device="cpu")
    engine = VllmEngine(actor, tmp_path, devices=[""], dtype="float32", max_model_len=64, enforce_eager=True)
    try:
        for version in range(3):
            if version:
                for parameter in actor.engine.module.parameters():
                    parameter.data.add_(torch.randn_like(parameter) * 0.05)
                engine.update_weights(actor, version)
            batch = engine.generate(PROMPTS, SamplingOptions(6, n=2))
            expected = actor.log_probs(batch).log_probs
            torch.testing.assert_close(batch["log_probs"][batch.mask], expected[batch.mask], rtol=0, atol=3e-5)
    finally:
        engine.close()
