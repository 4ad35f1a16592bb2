"""Qwen3-VL: the text part is Qwen3's; the vision tower is carried whole."""

from ckpt.layout.families.rows import ATTENTION, ENDS, GATED_MLP, NORMS, ROTARY_BUFFERS, SIZES
from ckpt.layout.families.table import Family
from ckpt.layout.families.towers import QWEN3_VL

FAMILY = Family(
    name="qwen3_vl",
    class_prefix="Qwen3VL",
    rows=(*ENDS, *NORMS, *ATTENTION, *GATED_MLP),
    sizes=SIZES,
    flags={"qkv_bias": "attention_bias", "o_bias": "attention_bias", "qk_norm": True, "mlp_bias": False},
    prefix="model.language_model.",
    inner_tie=False,
    other_prefixes=("model.",),
    carried=("model.visual.", "visual."),
    tower=QWEN3_VL,
    ignored=ROTARY_BUFFERS,
)
