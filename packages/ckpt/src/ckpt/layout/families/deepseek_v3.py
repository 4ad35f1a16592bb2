"""DeepSeek-V3: multi-head latent attention; routed and shared experts behind the first dense layers."""

from ckpt.layout.families.rows import ENDS, GATED_MLP, SIZES, experts, gate_up, norms
from ckpt.layout.families.table import Flags, Row, Size


def _down(name: str, megatron: str, size: str, when: str | None = None) -> tuple[Row, Row]:
    """Return the rows of a down projection `[size, H]`, which only Megatron's local spec splits over tp."""
    source, local = f"self_attn.{name}.weight", f"self_attention.{megatron}.weight"
    return (
        Row({source: f"{size} H"}, local, when=when, targets=("parallel", "megatron_te")),
        Row({source: f"{size}/tp H"}, local, when=when, targets=("megatron",)),
    )


_ATTENTION = (
    *_down("q_a_proj", "linear_q_down_proj", "A", when="q_lora"),
    Row(
        {"self_attn.q_a_layernorm.weight": "A"},
        "self_attention.q_layernorm.weight",
        megatron_te="self_attention.linear_q_up_proj.layer_norm_weight",
        when="q_lora",
    ),
    Row({"self_attn.q_b_proj.weight": "Q/tp A"}, "self_attention.linear_q_up_proj.weight", when="q_lora"),
    Row({"self_attn.q_proj.weight": "Q/tp H"}, "self_attention.linear_q_proj.weight", when="not q_lora"),
    *_down("kv_a_proj_with_mqa", "linear_kv_down_proj", "CR"),
    Row(
        {"self_attn.kv_a_layernorm.weight": "C"},
        "self_attention.kv_layernorm.weight",
        megatron_te="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    Row({"self_attn.kv_b_proj.weight": "KV/tp C"}, "self_attention.linear_kv_up_proj.weight"),
    Row({"self_attn.o_proj.weight": "H O/tp"}, "self_attention.linear_proj.weight"),
)

SHARED_EXPERTS = (
    gate_up("mlp.shared_experts", "weight", "S/tp H", layers="moe"),
    Row({"mlp.shared_experts.down_proj.weight": "H S/tp"}, "mlp.shared_experts.linear_fc2.weight", layers="moe"),
)
# Flag: correction_bias.
ROUTED_AND_SHARED = (
    *experts("mlp", "gate_proj", "up_proj", "down_proj"),
    Row(
        {"mlp.gate.e_score_correction_bias": "E"},
        "mlp.router.expert_bias",
        layers="moe",
        when="correction_bias",
        keep_dtype=True,
    ),
    *SHARED_EXPERTS,
)

_NORMS = norms("input_layernorm", "post_attention_layernorm", first_te="")
DEEPSEEK_ROWS = (*ENDS, *_NORMS, *_ATTENTION, *GATED_MLP, *ROUTED_AND_SHARED)
ROUTED_AND_SHARED_SIZES = {
    "E": Size("num_experts"),
    "M": Size("moe_intermediate_size"),
    "S": Size("n_shared_experts * moe_intermediate_size"),
}
DEEPSEEK_SIZES = {
    **SIZES,
    **ROUTED_AND_SHARED_SIZES,
    "A": Size("q_lora_rank"),
    "C": Size("kv_lora_rank"),
    "CR": Size("kv_lora_rank + qk_rope_head_dim"),
    "Q": Size("num_attention_heads", unit="qk_nope_head_dim + qk_rope_head_dim"),
    "KV": Size("num_attention_heads", unit="qk_nope_head_dim + v_head_dim"),
    "O": Size("num_attention_heads", unit="v_head_dim"),
}
LATENT_FLAGS: Flags = {"q_lora": "q_lora_rank", "mlp_bias": False, "correction_bias": True}
