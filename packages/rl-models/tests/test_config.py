"""`ModelConfig` and the families: what is read from a Hugging Face config, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from rl_models import CausalLM, ModelConfig, ValueModel
from rl_models.families import FAMILIES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def test_llama() -> None:
    config = ModelConfig.from_hf({**LLAMA, "attention_bias": True, "head_dim": 16})
    assert config.family == "llama"
    assert config.num_layers == 3
    assert config.windows == (None, None, None)
    assert (config.decoder.head_dim, config.decoder.num_kv_heads, config.decoder.norm_eps) == (16, 2, 1e-5)
    assert config.decoder.attention_bias
    assert config.decoder.output_bias
    assert not config.decoder.mlp_bias
    assert not config.tie_word_embeddings


def test_qwen2_has_biases_and_windows_from_a_layer_on() -> None:
    assert ModelConfig.from_hf(QWEN2).decoder.attention_bias
    assert not ModelConfig.from_hf(QWEN2).decoder.output_bias
    # A window in the config counts only when it is switched on.
    assert ModelConfig.from_hf({**QWEN2, "sliding_window": 8}).windows == (None, None, None)
    windowed = {**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}
    assert ModelConfig.from_hf(windowed).windows == (None, None, 8)
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert ModelConfig.from_hf({**windowed, "layer_types": types}).windows == (8, None, None)
    assert ModelConfig.from_hf(windowed).layer(2).window == 8


def test_qwen3_norms_its_heads_and_mistral_has_one_window() -> None:
    qwen3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert ModelConfig.from_hf({**qwen3, "head_dim": 16}).decoder.qk_norm == "head"
    assert ModelConfig.from_hf({**qwen3, "head_dim": 16}).decoder.head_dim == 16
    with pytest.raises(ValueError, match="head_dim=None must be a positive integer"):
        ModelConfig.from_hf(qwen3)
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert ModelConfig.from_hf({**mistral, "sliding_window": 5}).windows == (5, 5, 5)
    assert ModelConfig.from_hf({**mistral, "sliding_window": None}).windows == (None, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "known: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MistralForCausalLM",
        ),
        ({"architectures": None, "model_type": "gpt2"}, "model_type='gpt2' is not supported"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30.0 changes the numbers"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0.1 changes the numbers"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["chunked_attention"] * 3}, r"layer_types \['chunked_attention'\] are not known"),
        ({"hidden_size": None}, "hidden_size=None must be a positive integer"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers='3' must be a positive integer"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**LLAMA, **change})


def test_a_folder_is_read_and_a_broken_one_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        ModelConfig.from_hf(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        ModelConfig.from_hf(tmp_path)
    file.write_text("[]")
    with pytest.raises(ValueError, match="holds list"):
        ModelConfig.from_hf(tmp_path)
    file.write_text(json.dumps(LLAMA))
    assert ModelConfig.from_hf(tmp_path) == ModelConfig.from_hf(LLAMA)


# The biases that a config may ask for.
BIASES = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", ["plain", "tied", "biases"])
@pytest.mark.parametrize(("model", "role"), [(CausalLM, "causal_lm"), (ValueModel, "value")])
def test_the_models_have_the_tensors_of_the_layout(family: str, options: str, model: Any, role: Any) -> None:
    changes = {"plain": {}, "tied": {"tie_word_embeddings": True}, "biases": BIASES.get(family, {})}[options]
    architectures = [f"{FAMILIES[family].class_prefix}ForCausalLM"]
    values = {**LLAMA, "architectures": architectures, "model_type": family, "head_dim": 16, **changes}
    built = model(ModelConfig.from_hf(values), dtype=torch.float32, device="meta")
    blocks = ckpt.layout_for(values, role=role).at(ckpt.Place())
    assert {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()} == {
        name: tuple(block.shape) for name, block in blocks.items()
    }
