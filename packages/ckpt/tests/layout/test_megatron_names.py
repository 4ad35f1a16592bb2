"""The stored names of Transformer Engine's spec are those that Megatron-Bridge 0.6.2 maps (its files `*_bridge.py`).

Megatron-Core's own reader takes the names of the local spec in the root's tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt import layout_for
from ckpt.layout.megatron_names import stored_blocks

ENDS = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
ATTENTION = {"self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight"}
ATTENTION |= {"self_attention.linear_proj.weight"}
HEAD_NORMS = {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
MLP = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
# A module of Megatron-Bridge's, `mlp.experts.linear_fc1`, is stored under `mlp.experts.experts.linear_fc1`.
EXPERTS = {"pre_mlp_layernorm.weight", "mlp.router.weight"}
EXPERTS |= {"mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight"}
SHARED = {"mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight", "mlp.router.expert_bias"}
LATENT = {"input_layernorm.weight", "self_attention.linear_proj.weight", "self_attention.linear_q_down_proj.weight"}
LATENT |= {
    f"self_attention.linear_{side}_up_proj.{kind}" for side in ("q", "kv") for kind in ("weight", "layer_norm_weight")
}
LATENT |= {"self_attention.linear_kv_down_proj.weight"}


@pytest.mark.parametrize(
    ("name", "in_layers"),
    [
        ("llama", ATTENTION | MLP),
        ("qwen2", ATTENTION | MLP | {"self_attention.linear_qkv.bias"}),
        ("qwen3", ATTENTION | HEAD_NORMS | MLP | {"self_attention.linear_qkv.bias", "self_attention.linear_proj.bias"}),
        ("qwen3-moe", ATTENTION | HEAD_NORMS | MLP | EXPERTS),
        ("deepseek", LATENT | MLP | EXPERTS | SHARED),
        ("glm4-moe", ATTENTION | HEAD_NORMS | MLP | EXPERTS | SHARED | {"self_attention.linear_qkv.bias"}),
    ],
)
def test_the_names_are_those_of_megatron_bridge(
    name: str, in_layers: set[str], checkpoint: Callable[..., Path]
) -> None:
    names = {
        re.sub(r"decoder\.layers\.\d+\.", "", stored)
        for stored in stored_blocks(layout_for(checkpoint(name)), "megatron_te")
    }
    assert names == ENDS | in_layers


def test_layers_are_stacked_or_numbered(checkpoint: Callable[..., Path]) -> None:
    layout = layout_for(checkpoint("llama"))
    numbered = stored_blocks(layout, "megatron_te")["decoder.layers.1.mlp.linear_fc2.weight"]
    stacked = stored_blocks(layout, "megatron_te", homogeneous=True)["decoder.layers.mlp.linear_fc2.weight"]
    assert stacked.shape == (2, *numbered.shape)
    assert stacked.part(((1, 2), *((0, side) for side in numbered.shape))).names == numbered.names
    with pytest.raises(ValueError, match="not covered exactly once"):
        stored_blocks(layout_for(checkpoint("qwen3-moe")), "megatron_te", homogeneous=True)
