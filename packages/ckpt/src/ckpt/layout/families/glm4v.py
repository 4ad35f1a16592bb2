"""GLM-4.1V: GLM-4's text part, with norms behind attention and MLP and a fused gate-up in files; vision carried
whole."""

from ckpt.layout.families.rows import ATTENTION, ENDS, LAYER, MEGATRON, NORMS, ROTARY_BUFFERS, SIZES, norm, same
from ckpt.layout.families.table import Family, Row
from ckpt.layout.families.towers import GLM4V

_POST_NORMS = (
    norm("post_self_attn_layernorm", "post_self_attn_layernorm", "post_self_attn_layernorm"),
    norm("post_mlp_layernorm", "post_mlp_layernorm", "post_mlp_layernorm"),
)
_MLP = (
    Row(
        {f"{LAYER}mlp.gate_up_proj.weight": "I/tp+I/tp H"},
        parallel=f"{LAYER}mlp.gate_up_proj.weight",
        megatron=f"{MEGATRON}mlp.linear_fc1.weight",
    ),
    same("mlp.down_proj.weight", "H I/tp", "mlp.linear_fc2.weight"),
)

FAMILY = Family(
    name="glm4v",
    class_prefix="Glm4v",
    rows=(*ENDS, *NORMS, *_POST_NORMS, *ATTENTION, *_MLP),
    sizes=SIZES,
    flags={"qkv_bias": ("attention_bias", True), "o_bias": False, "qk_norm": False},
    prefix="model.language_model.",
    other_prefixes=("model.",),
    carried=("model.visual.", "visual."),
    tower=GLM4V,
    ignored=ROTARY_BUFFERS,
)
