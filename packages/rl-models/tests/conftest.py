"""The tiny models and the pools of ranks of this package's tests."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers


@pytest.fixture(scope="session")
def rank_imports() -> Sequence[str]:
    """Name the modules that these ranks need and that take a second or more to import."""
    return (
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.checkpoint",
    )


SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "norm_topk_prob": True,
}
# Name -> class of transformers and the fields of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "critic": ("LlamaForTokenClassification", {**SIZES, "num_labels": 1}),
    "reward": ("LlamaForSequenceClassification", {**SIZES, "num_labels": 1, "pad_token_id": 0}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {
            **SIZES,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "mixture": ("Qwen3MoeForCausalLM", {**SIZES, **EXPERTS}),
    "deepseek": ("DeepseekV3ForCausalLM", SIZES),
    "hybrid": (
        "Qwen3NextForCausalLM",
        {
            **{**SIZES, **EXPERTS, "shared_expert_intermediate_size": 16, "linear_conv_kernel_dim": 3},
            **{"layer_types": ["linear_attention", "linear_attention", "full_attention"], "rms_norm_eps": 1e-3},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 6, "linear_value_head_dim": 5},
        },
    ),
    # Inputs of its own in every layer, and layers that reuse keys and values.
    "gemma4-e2b": (
        "Gemma4ForCausalLM",
        {
            **{**SIZES, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61, "num_kv_shared_layers": 2},
            **{"head_dim": 8, "global_head_dim": 16, "sliding_window": 4, "use_double_wide_mlp": True},
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that saves a model of the table, with changes of its config, once, and returns the folder."""

    @cache
    def save(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        torch.manual_seed(0)
        architecture, fields = MODELS[name]
        fields = {
            name: list(value) if isinstance(value, tuple) else value for name, value in {**fields, **changes}.items()
        }
        kind = getattr(transformers, architecture)
        folder = tmp_path_factory.mktemp(name)
        kind(kind.config_class(**fields)).to(dtype).save_pretrained(folder)
        return folder

    return save
