"""Qwen3: explicit head_dim and a norm on each query and key head."""

from ckpt.layout.families.rows import ATTENTION, ENDS, GATED_MLP, NORMS, ROTARY_BUFFERS, SIZES
from ckpt.layout.families.table import Family

FAMILY = Family(
    name="qwen3",
    class_prefix="Qwen3",
    rows=(*ENDS, *NORMS, *ATTENTION, *GATED_MLP),
    sizes=SIZES,
    flags={"qkv_bias": "attention_bias", "o_bias": "attention_bias", "qk_norm": True, "mlp_bias": False},
    ignored=ROTARY_BUFFERS,
)
