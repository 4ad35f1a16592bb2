"""Qwen2 and Qwen2.5: Llama's shape with a bias on queries, keys and values."""

from ckpt.layout.families.rows import ATTENTION, ENDS, GATED_MLP, NORMS, ROTARY_BUFFERS, SIZES
from ckpt.layout.families.table import Family

FAMILY = Family(
    name="qwen2",
    class_prefix="Qwen2",
    rows=(*ENDS, *NORMS, *ATTENTION, *GATED_MLP),
    sizes=SIZES,
    flags={"qkv_bias": True, "o_bias": False, "qk_norm": False, "mlp_bias": False},
    ignored=ROTARY_BUFFERS,
)
