"""Mistral: Llama's shape without biases; its attention window leaves the tensors as they are."""

from ckpt.layout.families.rows import ATTENTION, ENDS, GATED_MLP, NORMS, ROTARY_BUFFERS, SIZES
from ckpt.layout.families.table import Family

FAMILY = Family(
    name="mistral",
    class_prefix="Mistral",
    rows=(*ENDS, *NORMS, *ATTENTION, *GATED_MLP),
    sizes=SIZES,
    flags={"qkv_bias": False, "o_bias": False, "qk_norm": False, "mlp_bias": False},
    ignored=ROTARY_BUFFERS,
)
