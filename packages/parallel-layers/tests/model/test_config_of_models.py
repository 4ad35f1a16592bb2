"""`ModelConfig` and the table of families: what is read from a Hugging Face config, and what is refused by name."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    OlmoHybridModel,
)

from parallel_layers.linear_attention.config import GatedDeltaNetConfig, KimiDeltaConfig, Mamba2Config
from parallel_layers.model import FAMILIES
from parallel_layers.model.config import ModelConfig
from parallel_layers.moe import MoEConfig

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
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
HYBRID = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
HYBRID |= {"linear_value_head_dim": 6, "linear_conv_kernel_dim": 3}
QWEN3_5 = {**LLAMA, **HYBRID, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
TINY_OLMO = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "pad_token_id": 0}
TINY_OLMO |= {"num_attention_heads": 2, "layer_types": ["linear_attention", "full_attention"], "eos_token_id": 0}
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


def test_olmo2_norms_behind_its_blocks_and_over_all_heads() -> None:
    config = ModelConfig.from_hf({**LLAMA, "architectures": ["Olmo2ForCausalLM"], "attention_bias": True})
    decoder = config.layer(2)
    assert (decoder.norm_placement, decoder.qk_norm) == ("post", "full")
    assert (decoder.attention_bias, decoder.output_bias, decoder.mlp_bias) == (True, True, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "known: ApertusForCausalLM, Cohere2ForCausalLM, DeepseekV2ForCausalLM, ",
        ),
        ({"architectures": None, "model_type": "gpt2"}, "model_type='gpt2' is not supported"),
        (
            {"architectures": ["Gemma4ForCausalLM"], "head_dim": 8, "num_kv_shared_layers": 3},
            "num_kv_shared_layers=3 of 3 layers leaves no layer of each kind",
        ),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30.0 changes the numbers"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0.1 changes the numbers"),
        ({"num_local_experts": 8}, r"num_local_experts=8 changes the numbers"),
        ({"layer_types": ["chunked_attention"] * 3}, r"layer_types \['chunked_attention'\] are not known"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types name 1 layers, but num_hidden_layers=3; write one type for each layer",
        ),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM' must be a list of names"),
        ({"layer_types": [["full_attention"]]}, "must be a list of names; write layer_types as transformers does"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "all"}, "sliding_window='all' must be a positive"),
        (
            {"architectures": ["MixtralForCausalLM"], "mlp_only_layers": "1"},
            "mlp_only_layers='1' must be a list of integers",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type='dynamic' is unknown; known types: default, linear"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object, such as"),
        ({"rope_parameters": None, "rope_scaling": "linear"}, "rope_scaling='linear' must be an object, such as"),
        ({"rope_parameters": None, "rope_theta": "1e4"}, "rope_theta='1e4' must be a number above 0"),
        ({"partial_rotary_factor": -1}, "partial_rotary_factor=-1 must be a number above 0"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "head_dim": 8, "rope_parameters": {"full_attention": [1]}},
            r"rope_parameters=\[1\] must be an object",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], **LATENT, "num_key_value_heads": 2},
            "num_key_value_heads=2, but latent attention makes keys and values for each of num_attention_heads=4",
        ),
        ({"hidden_size": None}, "hidden_size=None must be a positive integer"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None must be a number above 0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers='3' must be a positive integer; write num_hidden_layers as"),
        ({"mlp_bias": "no"}, "mlp_bias='no' must be true or false"),
        ({"hidden_act": 1}, "hidden_act=1 must be a name"),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0 changes the numbers, and the row of llama"),
        ({"architectures": ["MistralForCausalLM"], "mlp_bias": True}, "mlp_bias=True changes the numbers, .* mistral"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": -1},
            "num_experts=-1 must be an integer of at least",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}, "num_experts_per_tok=None must be a positive"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "kv_lora_rank=None must be a positive integer"),
        ({"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta=0.1 changes the numbers, .* llama"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_norm_min": 0.1}, "moe_norm_min=0.1 must be 1e-12"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "use_bias": True}, "use_bias=True changes the numbers"),
        ({**QWEN3_5, "attn_output_gate": False}, "attn_output_gate=False must be true"),
        ({**QWEN3_5, "linear_num_value_heads": 3}, "num_value_heads=3 is not a multiple of num_key_heads=2"),
        ({**QWEN3_5, "linear_conv_kernel_dim": None}, "linear_conv_kernel_dim=None must be a positive integer"),
        ({**QWEN3_5, "layer_types": ["mamba"] * 3}, r"layer_types \['mamba'\] are not known for qwen3_5_text"),
        ({"layer_types": ["linear_attention"] * 3}, r"layer_types \['linear_attention'\] are not known for llama"),
        ({"attn_output_gate": True}, "attn_output_gate=True changes the numbers, and the row of llama"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**LLAMA, **change})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
BY_KIND = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 8, "rope_parameters": BY_KIND}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # The recipe of Qwen's model cards for long contexts, on a config that transformers 5 has written.
        (
            {"rope_scaling": YARN},
            "rope_parameters and rope_scaling differ in factor, original_max_.*, rope_type: .*yarn",
        ),
        ({"rope_scaling": {"type": "default"}}, "differ in rope_theta: "),
        ({"rope_theta": 1e6}, r"rope_parameters.rope_theta=10000.0 and rope_theta=1000000.0, two names of one value"),
        (
            {"rope_parameters": {**YARN, "type": "linear"}},
            "rope_type='yarn' and rope_parameters.type='linear', two names",
        ),
        (
            {"rope_parameters": YARN, "original_max_position_embeddings": 4096},
            "original_max_position_embeddings=32768 and original_max_position_embeddings=4096",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5},
            "rope_parameters.partial_rotary_factor=0.25 and partial_rotary_factor=0.5",
        ),
        (
            {"architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 8, "rotary_dim": 4, "partial_rotary_factor": 1.0},
            "partial_rotary_factor=1.0 and rotary_dim / head_dim=0.5",
        ),
        ({**GEMMA3, "rope_theta": 1e4}, r"full_attention.rope_theta=1000000.0 and rope_theta=10000.0"),
        ({**GEMMA3, "rope_local_base_freq": 1e5}, r"sliding_attention.rope_theta=10000.0 and rope_local_base_freq="),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts": 4},
            "num_local_experts=8 and num_experts=4, two names of one value; remove the wrong one",
        ),
        # transformers ignores them in families that rotate whole heads, or computes something else.
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 changes the numbers, and llama rotates whole heads",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 changes the numbers"),
        (
            {
                **{**GEMMA3, "layer_types": ["full_attention"] * 3},
                "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}},
            },
            "partial_rotary_factor=0.5 changes the numbers, and gemma3_text rotates whole heads",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "rope"),
    [
        ({"rope_scaling": {"type": "default", "rope_theta": 1e4}, "rope_theta": 1e4}, {"rope_theta": 1e4}),
        ({"rope_scaling": {}, "partial_rotary_factor": 1.0}, {"partial_rotary_factor": 1.0}),
        ({"rope_parameters": None, "rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 1e6}, {"rope_theta": 1e6}),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": YARN, "rope_theta": 1e6},
            {"rope_theta": 1e6},
        ),
        ({**GEMMA3, "rope_theta": 1e6, "rope_local_base_freq": 1e4}, {"rope_theta": 1e4}),
        (
            {"architectures": ["Qwen2ForCausalLM"], "num_experts": 0, "num_local_experts": 0, "rope_theta": 10000},
            {"rope_theta": 1e4},
        ),
    ],
)
def test_a_value_may_stand_under_both_of_its_names(change: dict[str, Any], rope: dict[str, Any]) -> None:
    config = ModelConfig.from_hf({**LLAMA, **change})
    assert config.ropes[0] is not None
    assert rope.items() <= config.ropes[0].items()


def test_a_config_object_is_read_and_a_description_is_itself() -> None:
    config = ModelConfig.from_hf(AutoConfig.for_model(**LLAMA))
    assert config.decoder == ModelConfig.from_hf(LLAMA).decoder
    assert ModelConfig.from_hf(config) is config
    with pytest.raises(ValueError, match=r"config is a list; pass a mapping, an object with to_dict\(\), or a"):
        ModelConfig.from_hf([])


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


MOE_FIELDS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 12},
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
}


def test_qwen3_moe_has_experts_in_some_layers() -> None:
    values = {**LLAMA, **MOE_FIELDS, "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
    config = ModelConfig.from_hf({**values, "mlp_only_layers": [1]})
    assert [part is not None for part in config.moe] == [True, False, True]
    assert config.layer(0).moe == MoEConfig(num_experts=4, top_k=2, intermediate_size=16)
    assert config.layer(1).moe is None
    sparse = ModelConfig.from_hf({**values, "decoder_sparse_step": 2, "norm_topk_prob": False})
    assert [part is not None for part in sparse.moe] == [False, True, False]
    assert not sparse.layer(1).moe.normalize_top_k
    # The coefficient that it was trained with adds nothing: an update's options do.
    assert ModelConfig.from_hf({**values, "router_aux_loss_coef": 0.1}).layer(0).moe.balance_loss == 0
    assert config.with_router_losses(balance_loss=0.1, z_loss=0.2).layer(0).moe.balance_loss == 0.1


def test_ernie_has_names_of_its_own_for_its_experts() -> None:
    values = {**LLAMA, "architectures": ["Ernie4_5_MoeForCausalLM"], "num_hidden_layers": 6, "moe_k": 2}
    config = ModelConfig.from_hf({**values, "moe_num_experts": 4, "moe_intermediate_size": 16})
    assert config.moe[1] == MoEConfig(
        num_experts=4,
        top_k=2,
        intermediate_size=16,
        correction_bias=True,
        fp32_router=True,
        shared_intermediate_size=32,
    )
    assert [part is not None for part in config.moe] == [False, *[True] * 5]
    layers = {"moe_layer_start_index": 0, "moe_layer_end_index": 4, "moe_layer_interval": 2}
    some = ModelConfig.from_hf({**values, **layers}).moe
    assert [part is not None for part in some] == [False, True, False, True, False, False]


def test_deepseek_v3_routes_by_sigmoid_and_compresses_keys_and_values() -> None:
    config = ModelConfig.from_hf({**LLAMA, **DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "head_dim": 4})
    assert config.moe[0] is None
    moe = config.layer(1).moe
    assert (moe.scoring, moe.correction_bias, moe.num_groups, moe.shared_intermediate_size) == ("sigmoid", True, 2, 32)
    assert config.decoder.latent.q_lora_rank == 12
    assert config.decoder.head_dim == 12


def test_layers_with_linear_attention_stand_between_layers_with_full_attention() -> None:
    config = ModelConfig.from_hf({**QWEN3_5, "num_hidden_layers": 8})
    linear = [config.layer(index).linear_attention for index in range(8)]
    assert linear[0] == GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=6, conv_kernel_size=3, norm_eps=1e-5
    )
    assert linear == [linear[0], linear[0], linear[0], None] * 2
    assert [rope is None for rope in config.ropes] == [True, True, True, False] * 2
    assert (config.decoder.output_gate, config.decoder.norm_unit_offset, config.decoder.qk_norm) == (True, True, "head")
    assert config.ropes[3]["partial_rotary_factor"] == 0.25
    often = ModelConfig.from_hf({**QWEN3_5, "num_hidden_layers": 4, "full_attention_interval": 2})
    assert [often.layer(index).linear_attention is None for index in range(4)] == [False, True, False, True]
    types = ["full_attention", "linear_attention", "linear_attention"]
    stated = ModelConfig.from_hf({**QWEN3_5, "layer_types": types})
    assert [stated.layer(index).linear_attention is None for index in range(3)] == [True, False, False]


def test_olmo_hybrid_has_norms_by_the_kind_of_layer_and_rotates_unless_its_base_is_null() -> None:
    hybrid = {**LLAMA, **HYBRID, "architectures": ["OlmoHybridForCausalLM"], "num_hidden_layers": 4}
    hybrid["rms_norm_eps"] = 1e-3  # transformers' class has another epsilon behind the recurrence
    config = ModelConfig.from_hf(hybrid)
    layers = [config.layer(index) for index in range(4)]
    assert [layer.norm_placement for layer in layers] == ["pre", "pre", "pre", "post"]
    assert [layer.linear_attention is None for layer in layers] == [False, False, False, True]
    few = ModelConfig.from_hf({**hybrid, "num_hidden_layers": 3})
    assert [few.layer(index).linear_attention is None for index in range(3)] == [False, False, True]
    linear = layers[0].linear_attention
    assert (linear.negative_eigenvalues, linear.norm_eps, config.decoder.qk_norm) == (True, 1e-5, "full")
    bounded = ModelConfig.from_hf({**hybrid, "linear_allow_neg_eigval": False}).layer(0).linear_attention
    assert not bounded.negative_eigenvalues
    for stated, rotates in (
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, False),
        ({"rope_parameters": None, "rope_theta": None}, False),
        ({"rope_parameters": None}, True),
        ({}, True),
    ):
        ropes = ModelConfig.from_hf({**hybrid, **stated}).ropes
        theirs = OlmoHybridModel(OlmoHybridConfig(**TINY_OLMO, **stated)).rotary_emb
        assert [rope is None for rope in ropes] == [True, True, True, not rotates], stated
        assert (theirs is not None) == rotates, stated


def test_kimi_linear_reads_published_configs_as_transformers_does() -> None:
    section = {"head_dim": 6, "num_heads": 2, "short_conv_kernel_size": 3}
    section |= {"full_attn_layers": [2, 4], "kda_layers": [1, 3]}
    published = {**LLAMA, **LATENT, "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
    published |= {"num_hidden_layers": 4, "num_key_value_heads": 4, "linear_attn_config": section, "num_experts": 8}
    published |= {"num_experts_per_token": 2, "num_shared_experts": 2, "moe_intermediate_size": 16, "topk_group": 1}
    published |= {"moe_renormalize": True, "num_expert_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1}
    config = ModelConfig.from_hf(published)
    theirs = ModelConfig.from_hf(KimiLinearConfig(**published).to_dict())
    assert replace(config, hf=theirs.hf) == theirs
    linear = [config.layer(index).linear_attention for index in range(4)]
    assert linear == [KimiDeltaConfig(num_heads=2, head_dim=6, conv_kernel_size=3), None] * 2
    assert (config.ropes, config.moe[0], config.moe[1].shared_intermediate_size) == ((None,) * 4, None, 32)
    assert config.moe[1].fp32_router
    unlisted = {name: value for name, value in section.items() if "layers" not in name}
    by_default = ModelConfig.from_hf({**published, "num_hidden_layers": 9, "linear_attn_config": unlisted})
    assert [index for index in range(9) if by_default.layer(index).linear_attention is None] == [4, 8]
    with pytest.raises(ValueError, match="hidden_act='gelu' must be 'silu'"):
        ModelConfig.from_hf({**published, "hidden_act": "gelu"})


def test_granite_hybrid_reads_published_configs_as_transformers_does() -> None:
    published = {**LLAMA, "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"}
    published |= {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 8}
    published |= {"mamba_d_state": 6, "position_embedding_type": "nope", "num_local_experts": 4}
    published |= {"shared_intermediate_size": 24, "attention_multiplier": 0.5, "logits_scaling": 4.0}
    config = ModelConfig.from_hf(published)
    theirs = ModelConfig.from_hf(GraniteMoeHybridConfig(**published).to_dict())
    assert replace(config, hf=theirs.hf) == theirs
    space = Mamba2Config(num_heads=8, head_dim=8, num_groups=1, state_size=6, step_limit=(0.0, math.inf))
    assert [config.layer(index).linear_attention for index in range(3)] == [space, None, space]
    assert (config.ropes, config.decoder.intermediate_size, config.logit_scale) == ((None,) * 3, 24, 0.25)
    assert (config.moe[0].intermediate_size, config.moe[0].shared_intermediate_size) == (64, 24)
    automatic = ModelConfig.from_hf({**published, "mamba_d_head": "auto", "mamba_expand": 4})
    assert automatic.layer(0).linear_attention == replace(space, head_dim=16)
    dense = ModelConfig.from_hf({**published, "num_local_experts": 0, "position_embedding_type": "rope"})
    assert (dense.moe, [rope is None for rope in dense.ropes]) == ((None,) * 3, [True, False, True])
    for changes, message in (
        ({"hidden_act": "gelu"}, "hidden_act='gelu' must be 'silu'"),
        ({"mamba_d_head": "all"}, "mamba_d_head='all' must be a positive integer"),
        ({"time_step_limit": [0.1]}, r"time_step_limit=\[0.1\] must be two numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_hf({**published, **changes})


NEMOTRON = {**LLAMA, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "mamba_num_heads": 8}
NEMOTRON |= {"mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "layer_norm_epsilon": 1e-5, "head_dim": 8}


def test_nemotron_h_has_one_mixer_a_layer_by_names_or_letters() -> None:
    moe = {"n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24}
    published = {**NEMOTRON, **moe, "hybrid_override_pattern": "M-*EM", "num_hidden_layers": 5, "use_bias": True}
    config = ModelConfig.from_hf(published)
    theirs = ModelConfig.from_hf(NemotronHConfig(**published).to_dict())
    assert replace(config, hf=theirs.hf) == theirs
    space = Mamba2Config(num_heads=8, head_dim=8, num_groups=2, state_size=6, projection_bias=True)
    layers = [config.layer(index) for index in range(5)]
    assert [layer.mixer for layer in layers] == ["attention", "mlp", "attention", "mlp", "attention"]
    assert [layer.linear_attention for layer in layers] == [space, None, None, None, space]
    assert [layer.moe is None for layer in layers] == [True, True, True, False, True]
    assert (layers[1].activation, layers[1].gated_mlp, config.ropes) == ("relu2", False, (None,) * 5)
    mixture = layers[3].moe
    assert (mixture.scoring, mixture.gated, mixture.fp32_router, mixture.latent_size) == ("sigmoid", False, True, 0)
    for changes, message in (
        ({"hybrid_override_pattern": "M+"}, r"hybrid_override_pattern has \['\+'\]; a layer is one of"),
        ({"layers_block_type": ["mamba", "moe"], "mlp_bias": True}, "mlp_bias=True with layers of experts"),
        ({"layers_block_type": ["mamba", "conv"]}, r"layer_types \['conv'\] are not known for nemotron_h"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu' must be 'silu'"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_hf({**published, **changes})


# What tensors have which shapes: a config that lacks one of these does not fit its checkpoint, and is refused.
OF_SHAPES = {
    "num_key_value_heads",
    "head_dim",
    "first_k_dense_replace",
    "mlp_layer_types",
    *("mamba_d_head", "mamba_n_heads", "mamba_num_heads", "mamba_head_dim", "layers_block_type"),
    "n_shared_experts",
    "num_local_experts",
    "q_lora_rank",
} | {name for name in LLAMA if name.startswith(("vocab", "hidden_size", "intermediate", "num_"))}
TEXTS = {"gemma4": "gemma4_text", "kimi_k25": "deepseek_v3", "mistral3": "ministral3"}
WINDOWED = {"use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.families("family")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_does_not_say_is_what_transformers_has_or_refused(family: str) -> None:
    known: dict[str, Any] = {name: LLAMA[name] for name in LLAMA.keys() & OF_SHAPES}
    latent = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_experts_per_tok": 2,
    }
    known |= {"granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16}}.get(family, {})
    sizes = {**known, **WINDOWED, **(latent if FAMILIES[family].latent else {})}
    sections = FAMILIES[family].sections
    if sections is not None:
        sizes["hidden_size"] = 4 * int(2 * sum(sections.sizes) / (FAMILIES[family].partial_rotary_factor or 1))
    nested = FAMILIES[family].has_vision
    if nested:
        sizes = {"text_config": {**sizes, **({"model_type": TEXTS[family]} if family in TEXTS else {})}}
    whole = AutoConfig.for_model(family, **sizes).to_dict()
    whole["architectures"] = [f"{FAMILIES[family].class_prefix}ForCausalLM"]
    expected = ModelConfig.from_hf(whole)
    text = whole["text_config"] if nested else whole
    for name in text.keys() - OF_SHAPES - WINDOWED.keys() - {"architectures", "model_type"}:
        without = {key: value for key, value in text.items() if key != name}
        try:
            found = ModelConfig.from_hf({**whole, "text_config": without} if nested else without)
        except (ValueError, KeyError):
            continue
        # Layer types are made of the windows' other fields where there are none.
        assert replace(found, ropes=expected.ropes, hf=expected.hf) == expected, name
        for layer in range(3):
            ours, theirs = found.rotary(layer), expected.rotary(layer)
            assert (ours is None) == (theirs is None), name
            if ours is not None and theirs is not None:
                assert torch.equal(ours.inv_freq, theirs.inv_freq), name
                assert (ours.axes is None and theirs.axes is None) or torch.equal(ours.axes, theirs.axes), name


def test_sections_name_the_axis_of_every_frequency() -> None:
    vision = {**LLAMA, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "max_window_layers": 3}
    published = {"type": "mrope", "mrope_section": [1, 2, 1]}
    config = ModelConfig.from_hf({**vision, "rope_parameters": None, "rope_scaling": published, "rope_theta": 1e4})
    rotary = config.rotary()
    assert rotary is not None
    assert rotary.axes.tolist() == [0, 1, 1, 2]
    nested = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {**LLAMA, "head_dim": 12}}
    rope = {"rope_type": "default", "mrope_section": [3, 2, 1]}
    nested["text_config"]["rope_parameters"] = rope
    assert ModelConfig.from_hf(nested).rotary().axes.tolist() == [0, 1, 2, 0, 1, 0]
    for sections, message in (([3, 2], "must be three sizes"), ([3, 2, 2], "given for 7 frequencies, and 12 rotary")):
        rope["mrope_section"] = sections
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_hf(nested).rotary()


def test_the_text_part_says_whether_the_embeddings_are_tied() -> None:
    for name, tied in (("Qwen2_5_VL", True), ("Qwen3VL", False)):
        text = {**LLAMA, "head_dim": 8, "tie_word_embeddings": True}
        config = {"architectures": [f"{name}ForConditionalGeneration"], "text_config": text}
        text["rope_parameters"] = {"mrope_section": [1, 1, 2]}
        assert ModelConfig.from_hf(config).tie_word_embeddings is tied
        assert ModelConfig.from_hf({**config, "tie_word_embeddings": True}).tie_word_embeddings


GEMMA4 = {
    **{**LLAMA, "architectures": ["Gemma4ForCausalLM"], "head_dim": 8, "num_hidden_layers": 2},
    **{"layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": True},
    **{"hidden_size_per_layer_input": 0, "rope_parameters": None},
}


def test_gemma_4_has_the_heads_of_published_configs_and_of_saved_ones() -> None:
    published = ModelConfig.from_hf({**GEMMA4, "global_head_dim": 16, "num_global_key_value_heads": 1})
    saved = ModelConfig.from_hf({**GEMMA4, "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}}})
    for config in (published, saved):
        sliding, full = config.layer(0), config.layer(1)
        assert (sliding.head_dim, sliding.num_kv_heads, sliding.keys_as_values) == (8, 2, False)
        assert (full.head_dim, full.num_kv_heads, full.keys_as_values) == (16, 1, True)
        assert (sliding.window, full.window) == (512, None)
        # A quarter of the frequencies of the whole head.
        assert (config.rotary(1).inv_freq > 0).tolist() == [True] * 2 + [False] * 6
    with pytest.raises(ValueError, match=r"per_layer_config has \['intermediate_size'\]; the known fields"):
        ModelConfig.from_hf({**GEMMA4, "per_layer_config": {"1": {"intermediate_size": 16}}})
    with pytest.raises(ValueError, match="use_bidirectional_attention='all' must be null or \"vision\""):
        ModelConfig.from_hf({**GEMMA4, "use_bidirectional_attention": "all"})


def test_the_text_of_mistral_3_is_that_of_its_text_model() -> None:
    wrapper = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    text = {**{name: LLAMA[name] for name in LLAMA if name != "architectures"}, "head_dim": 8}
    windows = [
        ModelConfig.from_hf({**wrapper, "text_config": {**text, "model_type": kind}}).windows[0]
        for kind in ("mistral", "ministral3")
    ]
    assert windows == [4096, None]
    with pytest.raises(ValueError, match="model_type='qwen2' in a config of mistral3 is not supported; known: ministr"):
        ModelConfig.from_hf({**wrapper, "text_config": {**text, "model_type": "qwen2"}})


@pytest.mark.parametrize(
    ("model_type", "lacking"),
    [
        ("axk2", "an indexer"),
        ("bailing_hybrid", "delta attention whose decays"),
        ("deepseek_v4", "compressed keys and values, hyper-connections, and an indexer"),
        ("falcon_h1", "attention and Mamba-2 side by side"),
        ("glm5_next", "hyper-connections, and an indexer"),
        ("hy_v4_vl", "hyper-connections, and an indexer"),
        ("inkling", "short convolutions of keys"),
        ("inkling2_text", "short convolutions of keys"),
        ("lfm2", "gated short convolutions"),
        ("lfm2_vl", "gated short convolutions"),
        ("lfm3", "gated short convolutions"),
        ("minimax", "lightning attention"),
        ("minimax_m3_vl_text", "an indexer"),
        ("qwen4_exp", "embeddings of n-grams, gated residuals, and an indexer"),
        ("qwen4_exp_text", "embeddings of n-grams, gated residuals, and an indexer"),
        ("rwkv", "the recurrence of RWKV"),
        ("xlstm", "memory cells with exponential gates"),
        ("zamba2", "attention that several layers of Mamba-2 share"),
        ("zaya", "convolutions of queries and keys"),
    ],
)
def test_what_is_missing_of_other_models_is_named(model_type: str, lacking: str) -> None:
    message = f"model_type='{model_type}' is not supported: the layers lack {lacking}.*; known: ApertusForCausalLM"
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({"model_type": model_type, "architectures": ["OtherForCausalLM"]})
