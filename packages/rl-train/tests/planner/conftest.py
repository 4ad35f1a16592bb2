"""The small models that the planner's tests count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planner_models import ERNIE, HYBRID, LATENT, MIXTURE, NEMOTRON, SHARED_KV, SIZES
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path / "llama")
    LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 16})).save_pretrained(path / "deep")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**MIXTURE)).save_pretrained(path / "mixture")
    Olmo2ForCausalLM(Olmo2Config(**SIZES)).save_pretrained(path / "norms over all heads")
    DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT)).save_pretrained(path / "latent")
    Gemma4ForCausalLM(Gemma4TextConfig(**SHARED_KV)).save_pretrained(path / "shared kv")
    Qwen3NextForCausalLM(Qwen3NextConfig(**HYBRID)).save_pretrained(path / "hybrid")
    NemotronHForCausalLM(NemotronHConfig(**NEMOTRON)).save_pretrained(path / "one mixer a layer")
    Cohere2ForCausalLM(Cohere2Config(**SIZES)).save_pretrained(path / "parallel blocks")
    Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**ERNIE)).save_pretrained(path / "other names of experts")
    return path


@pytest.fixture(scope="session")
def model(models: Path) -> Path:
    return models / "llama"
