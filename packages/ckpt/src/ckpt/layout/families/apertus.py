"""Apertus: norms on queries and keys, and an MLP without a gate, whose xIELU activation has parameters."""

from ckpt.layout.families.rows import ATTENTION, ENDS, ROTARY_BUFFERS, SIZES, norms, same
from ckpt.layout.families.table import Family

_MLP = (
    same("mlp.up_proj.weight", "I/tp H", "mlp.linear_fc1.weight"),
    same("mlp.down_proj.weight", "H I/tp", "mlp.linear_fc2.weight"),
    same("mlp.act_fn.alpha_p", "L", "mlp.activation_func.alpha_p"),
    same("mlp.act_fn.alpha_n", "L", "mlp.activation_func.alpha_n"),
    # Constants of the activation that transformers stores as buffers.
    same("mlp.act_fn.beta", "", "mlp.activation_func.beta", optional=True),
    same("mlp.act_fn.eps", "", "mlp.activation_func.eps", optional=True),
)

FAMILY = Family(
    name="apertus",
    class_prefix="Apertus",
    rows=(*ENDS, *norms("attention_layernorm", "feedforward_layernorm"), *ATTENTION, *_MLP),
    sizes=SIZES,
    flags={"qkv_bias": "attention_bias", "o_bias": "attention_bias", "qk_norm": True},
    ignored=ROTARY_BUFFERS,
)
