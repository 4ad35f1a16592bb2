"""Llama 1, 2 and 3: grouped-query attention, gated MLP, biases where the config asks for them."""

from ckpt.layout.families.rows import ATTENTION, ENDS, GATED_MLP, NORMS, ROTARY_BUFFERS, SIZES
from ckpt.layout.families.table import Family

FAMILY = Family(
    name="llama",
    class_prefix="Llama",
    rows=(*ENDS, *NORMS, *ATTENTION, *GATED_MLP),
    sizes=SIZES,
    flags={"qkv_bias": "attention_bias", "o_bias": "attention_bias", "qk_norm": False, "mlp_bias": "mlp_bias"},
    ignored=ROTARY_BUFFERS,
)
