"""DeepSeek-V3: multi-head latent attention; routed and shared experts behind the first dense layers."""

from ckpt.layout.families.rows import ENDS, EXPERTS, GATED_MLP, norms, shared_experts
from ckpt.layout.families.table import Flags, Row


def _down(name: str, megatron: str, size: str, when: str | None = None) -> tuple[Row, Row]:
    """Return the rows of a down projection `[size, H]`, which only Megatron's local spec splits over tp."""
    source, local = f"self_attn.{name}.weight", f"self_attention.{megatron}.weight"
    return (
        Row({source: f"{size} H"}, local, when=when, targets=("parallel", "megatron_te")),
        Row({source: f"{size}/tp H"}, local, when=when, targets=("megatron",)),
    )


LATENT_ATTENTION = (
    *_down("q_a_proj", "linear_q_down_proj", "A", when="q_lora"),
    Row(
        {"self_attn.q_a_layernorm.weight": "A"},
        "self_attention.q_layernorm.weight",
        megatron_te="self_attention.linear_q_up_proj.layer_norm_weight",
        when="q_lora",
    ),
    Row({"self_attn.q_b_proj.weight": "LQ/tp A"}, "self_attention.linear_q_up_proj.weight", when="q_lora"),
    Row({"self_attn.q_proj.weight": "LQ/tp H"}, "self_attention.linear_q_proj.weight", when="not q_lora"),
    *_down("kv_a_proj_with_mqa", "linear_kv_down_proj", "CR"),
    Row(
        {"self_attn.kv_a_layernorm.weight": "C"},
        "self_attention.kv_layernorm.weight",
        megatron_te="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    Row({"self_attn.kv_b_proj.weight": "LKV/tp C"}, "self_attention.linear_kv_up_proj.weight"),
    Row({"self_attn.o_proj.weight": "H LO/tp"}, "self_attention.linear_proj.weight"),
)

SHARED_EXPERTS = shared_experts("mlp.shared_experts", "S")
# Flag: correction_bias.
ROUTED_AND_SHARED = (
    *EXPERTS,
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
DEEPSEEK_ROWS = (*ENDS, *_NORMS, *LATENT_ATTENTION, *GATED_MLP, *ROUTED_AND_SHARED)
LATENT_FLAGS: Flags = {"q_lora": "q_lora_rank", "correction_bias": True}
