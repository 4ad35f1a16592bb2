"""OLMo-2: norms behind attention and MLP alone, and a norm over all query heads and over all key heads of a token."""

from ckpt.layout.families.rows import ATTENTION, ENDS, GATED_MLP, ROTARY_BUFFERS, SIZES, norm, same
from ckpt.layout.families.table import Family

_NORMS = (
    norm("post_attention_layernorm", "post_attention_layernorm"),
    norm("post_feedforward_layernorm", "post_feedforward_layernorm"),
    # Whole on every rank: a rank takes its heads' part in the forward.
    same("self_attn.q_norm.weight", "Q"),
    same("self_attn.k_norm.weight", "KV"),
)

FAMILY = Family(
    name="olmo2",
    class_prefix="Olmo2",
    rows=(*ENDS, *_NORMS, *ATTENTION, *GATED_MLP),
    sizes=SIZES,
    flags={"qkv_bias": "attention_bias", "o_bias": "attention_bias", "qk_norm": False, "mlp_bias": False},
    ignored=ROTARY_BUFFERS,
)
