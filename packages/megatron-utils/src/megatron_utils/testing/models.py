"""Hugging Face configs of small models for tests: each family of `build_gpt`, and variants."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    # Latent attention, shared experts, experts in groups, a dense first layer.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "moe_intermediate_size": 12,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
}
# Partial rotation, norms of queries and keys, routed and shared experts.
_FAMILIES["glm4_moe"] = {
    **{"head_dim": 8, "use_qk_norm": True, "attention_bias": True, "n_routed_experts": 4, "n_shared_experts": 2},
    **{"moe_intermediate_size": 12, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0},
}
_FAMILIES["glm4_moe_lite"] = {**_FAMILIES["deepseek_v3"], "n_group": 1, "topk_group": 1, "pad_token_id": None}
_FAMILIES["seed_oss"] = {"head_dim": 8, "pad_token_id": None, "attention_dropout": 0.0, "residual_dropout": 0.0}
# Queries are scaled by their position from the fourth token on.
_FAMILIES["ministral3"] = {
    "pad_token_id": None,
    "head_dim": 8,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 4},
        "llama_4_scaling_beta": 0.5,
    },
}
_ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FAMILIES |= {
    # Groups are ranked by their best expert; weights do not sum to one.
    "deepseek_v2": {
        **{name: _FAMILIES["deepseek_v3"][name] for name in ("num_key_value_heads", "q_lora_rank", "kv_lora_rank")},
        **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 8, "n_shared_experts": 2},
        **{"moe_intermediate_size": 12, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
        **{"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        "routed_scaling_factor": 1.5,
    },
    "ernie4_5": {"head_dim": 8, "use_bias": True, "pad_token_id": None},
    "exaone4": {"head_dim": 8, "sliding_window": 4},
    "gemma2": {
        "pad_token_id": None,
        "head_dim": 8,
        "sliding_window": 4,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "pad_token_id": None,
        "head_dim": 8,
        "sliding_window": 4,
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 2,
    },
    "glm4": {"head_dim": 8, "attention_bias": True, "pad_token_id": None},
    "gpt_oss": {**_ROUTED, "head_dim": 8, "sliding_window": 4},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "granitemoe": {**_ROUTED, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "minimax_m2": {**_ROUTED, "head_dim": 8},
    "olmo2": {"pad_token_id": None},
    "olmo3": {"pad_token_id": None, "sliding_window": 4},
    "phi3": {"pad_token_id": None, "partial_rotary_factor": 0.5},
    "qwen2_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        **{"shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    },
    "smollm3": {"pad_token_id": None, "no_rope_layer_interval": 2},
}
MIXTURES = (
    *("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "glm4_moe_lite"),
    *("deepseek_v2", "gpt_oss", "granitemoe", "minimax_m2", "qwen2_moe"),
)
"""The families with routed experts."""


def tiny_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the config of a small model, for `build_gpt` and `transformers.AutoConfig.for_model(**config)`.

    No number divides the vocabulary of 37; two divides the four layers, four query heads and two key-value heads.

    Args:
        model_type: A family of `megatron_utils.gpt.FAMILIES`.
        changes: Fields with other values.

    Raises:
        ValueError: The family is unknown.
    """
    if model_type not in _FAMILIES:
        raise ValueError(f"model_type={model_type!r} is not one of {', '.join(_FAMILIES)}")
    return {"model_type": model_type, **_SIZES, **_FAMILIES[model_type], **changes}


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.5],
    "long_factor": [3.0],
    "original_max_position_embeddings": 17,
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama"),
    "llama-biased": tiny_config("llama", attention_bias=True, mlp_bias=True),
    "llama3-biased": tiny_config(
        "llama", rope_parameters=_LLAMA3_ROPE, attention_bias=True, mlp_bias=True, head_dim=6, rms_norm_eps=1e-5
    ),
    "deepseek-v3": tiny_config("deepseek_v3"),
    "deepseek-v3-yarn": tiny_config("deepseek_v3", rope_parameters=_YARN_ROPE, rms_norm_eps=1e-5),
    "deepseek-v3-full-query": tiny_config("deepseek_v3", q_lora_rank=None, n_group=1, topk_group=1),
    "glm4-moe": tiny_config("glm4_moe"),
    "glm4-moe-lite": tiny_config("glm4_moe_lite"),
    "ministral3": tiny_config("ministral3"),
    "mistral": tiny_config("mistral"),
    "phi3-longrope": tiny_config("phi3", rope_parameters=_LONGROPE, original_max_position_embeddings=17),
    **{
        name: tiny_config(name)
        for name in (
            *("deepseek_v2", "ernie4_5", "exaone4", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite"),
            *("granitemoe", "minimax_m2", "olmo2", "olmo3", "phi3", "qwen2_moe", "smollm3"),
        )
    },
    "qwen2-tied": tiny_config("qwen2", tie_word_embeddings=True),
    "qwen3": tiny_config("qwen3"),
    "qwen3-tied": tiny_config("qwen3", tie_word_embeddings=True),
    "seed-oss": tiny_config("seed_oss"),
    "qwen3-moe": tiny_config("qwen3_moe"),
    "qwen3-moe-hybrid": tiny_config("qwen3_moe", mlp_only_layers=[0]),
    "qwen3-moe-unnormed": tiny_config("qwen3_moe", norm_topk_prob=False),
    "mixtral": tiny_config("mixtral"),
}


def tiny_models(*names: str, **changes: Any) -> dict[str, dict[str, Any]]:
    """Return variants of the small models by name, each with the same fields changed.

    Raises:
        ValueError: A name is unknown.
    """
    if unknown := [name for name in names if name not in _VARIANTS]:
        raise ValueError(f"{', '.join(unknown)} not among {', '.join(_VARIANTS)}")
    return {name: _VARIANTS[name] | changes for name in names}
