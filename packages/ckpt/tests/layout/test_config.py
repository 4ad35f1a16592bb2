"""A config field that would change the layout is refused by name, never ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt import layout_for
from ckpt.layout.config import NEUTRAL_VALUES

Checkpoints = Callable[..., Path]

# Every field with a value that changes which tensors exist, or their shapes; the mistral table reads none of them.
CHANGING: dict[str, Any] = {
    "attention_bias": True,
    "qkv_bias": True,
    "attention_out_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "lm_head_bias": True,
    "qk_layernorm": True,
    "use_qk_norm": True,
    "qk_norm": True,
    "attn_output_gate": True,
    "layer_norm_type": "layernorm",
    "num_experts": 8,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 2,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "num_kv_shared_layers": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 8,
    "cross_attention_layers": [1],
}


def test_every_field_has_a_case() -> None:
    assert CHANGING.keys() == NEUTRAL_VALUES.keys()


@pytest.mark.parametrize("field", CHANGING)
def test_a_field_that_would_change_the_layout_is_refused_by_name(field: str, checkpoint: Checkpoints) -> None:
    config = json.loads((checkpoint("mistral") / "config.json").read_text())
    with pytest.raises(ValueError, match=rf"the config's {field}=.* the mistral table does not describe it"):
        layout_for({**config, field: CHANGING[field]})
    for neutral in NEUTRAL_VALUES[field]:
        layout_for({**config, field: neutral})


def test_gemma_4_has_the_shapes_of_published_configs_and_of_saved_ones(checkpoint: Checkpoints) -> None:
    saved = json.loads((checkpoint("gemma4") / "config.json").read_text())
    published = {name: value for name, value in saved.items() if name != "per_layer_config"}
    published |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    assert layout_for(published).canonical == layout_for(saved).canonical
    saved["per_layer_config"]["2"]["head_dim"] = 32
    with pytest.raises(ValueError, match="must give all layers with full attention the same heads"):
        layout_for(saved)
