"""Qwen2-VL: the text part is Qwen2's; the vision tower is carried whole."""

from ckpt.layout.families.rows import ATTENTION, ENDS, GATED_MLP, NORMS, ROTARY_BUFFERS, SIZES
from ckpt.layout.families.table import Family
from ckpt.layout.families.towers import QWEN2_VL

FAMILY = Family(
    name="qwen2_vl",
    class_prefix="Qwen2VL",
    rows=(*ENDS, *NORMS, *ATTENTION, *GATED_MLP),
    sizes=SIZES,
    flags={"qkv_bias": True, "o_bias": False, "qk_norm": False, "mlp_bias": False},
    other_prefixes=("model.language_model.",),
    carried=("visual.", "model.visual."),
    tower=QWEN2_VL,
    ignored=ROTARY_BUFFERS,
)
