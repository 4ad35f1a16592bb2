"""Qwen3-MoE: Qwen3's attention; routed experts, with dense layers where the config puts them."""

from ckpt.layout.families.rows import ATTENTION, ENDS, GATED_MLP, NORMS, ROTARY_BUFFERS, SIZES, experts
from ckpt.layout.families.table import Family, Size

FAMILY = Family(
    name="qwen3_moe",
    class_prefix="Qwen3Moe",
    rows=(*ENDS, *NORMS, *ATTENTION, *GATED_MLP, *experts("mlp", "gate_proj", "up_proj", "down_proj")),
    sizes={**SIZES, "E": Size("num_experts"), "M": Size("moe_intermediate_size")},
    flags={"qkv_bias": "attention_bias", "o_bias": "attention_bias", "qk_norm": True, "mlp_bias": False},
    experts=True,
    ignored=ROTARY_BUFFERS,
)
