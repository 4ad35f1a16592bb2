"""The kinds of layers that a config does not list are those of transformers."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from ckpt.layout.config import text_config
from ckpt.layout.families import family_of
from ckpt.layout.layer_kinds import layer_kinds

NAMES = {"full_attention": "full", "sliding_attention": "sliding", "linear_attention": "linear"}


@pytest.mark.parametrize("num_layers", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "gemma4_text"])
def test_types_that_a_config_leaves_out(model_type: str, num_layers: int) -> None:
    config = AutoConfig.for_model(model_type, num_hidden_layers=num_layers).to_dict()
    types = config.pop("layer_types")
    family, text = family_of(config), text_config({**config, "num_kv_shared_layers": 0})
    kinds = [layer_kinds(family, text, layer, num_layers, has_experts=False)[-1] for layer in range(num_layers)]
    assert kinds == [NAMES[kind] for kind in types]
