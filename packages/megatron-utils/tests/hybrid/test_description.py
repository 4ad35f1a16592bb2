"""`build_hybrid` reads letters of layers and sizes from a config, and refuses others by name."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_utils.hybrid.description import describe_hybrid
from parallel_layers import ModelConfig

CONFIG: dict[str, Any] = {
    **{"model_type": "nemotron_h", "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2},
    **{"ssm_state_size": 5, "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "time_step_min": 1e-9},
}


def test_the_config_says_layers_and_sizes() -> None:
    model, pattern, options = describe_hybrid(ModelConfig.from_hf(CONFIG), 2)
    assert pattern == "M-*E"
    assert options == {"mamba_num_heads": 4, "mamba_head_dim": 6, "mamba_num_groups": 2, "mamba_state_dim": 5}
    assert not any(model.own_fields)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"time_step_min": 0.001}, 1, r"nemotron_h has time_step_min=0.001 \(1e-9 in config.json computes as"),
        ({"use_conv_bias": False, "layer_norm_epsilon": 1e-6}, 1, "has conv_bias=False; norm_eps=1e-06, which is not"),
        ({"moe_latent_size": 8}, 1, "nemotron_h has moe_latent_size, which is not supported on Megatron-Core"),
        ({}, 4, r"n_groups=2 of Mamba-2 does not divide over tp=4; use tp in \[1, 2\]"),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "num_hidden_layers": 2}
            | {
                "mamba_n_heads": 4,
                "mamba_d_head": 6,
                "n_routed_experts": None,
                "layers_block_type": None,
                "rms_norm_eps": 1e-5,
            },
            1,
            "granitemoehybrid has layers that are no layers of Megatron-Core's HybridModel",
        ),
    ],
    ids=["steps", "convolution", "latent experts", "groups", "two halves"],
)
def test_what_megatron_core_cannot_express_is_refused(changes: dict[str, Any], tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_hybrid(ModelConfig.from_hf(CONFIG | changes), tp)
