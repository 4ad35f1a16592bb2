"""Sizes of the small models that the planner's tests count."""

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
MIXTURE = SIZES | {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
LATENT = SIZES | {
    "num_key_value_heads": 8,
    "moe_intermediate_size": 96,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
SHARED_KV = SIZES | {
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 1000,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
HYBRID = SIZES | {
    "num_experts": 0,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
ERNIE = SIZES | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 96}
# The targets of adapters on every projection, those of experts, too.
EXPERTS = ("all-linear", "experts.gate_up_proj", "experts.down_proj")
NEMOTRON = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"} | {"head_dim": 64}
NEMOTRON |= {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "mamba_num_heads": 8}
NEMOTRON |= {"mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 64}
