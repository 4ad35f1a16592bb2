"""Qwen3-Next and Qwen3.5: layers of gated delta networks beside layers of gated attention."""

import dataclasses

from ckpt.layout.families.gated_delta_net import beside_linear, projections, recurrence
from ckpt.layout.families.rows import ATTENTION, ENDS, EXPERTS, GATED_MLP, NORMS, PREDICTING, QWEN2_SHARED_EXPERT
from ckpt.layout.families.table import Family, Flags, Row

# The rows of q_proj have two parts for each head: its query, and the gate of its output.
_GATED_ATTENTION = tuple(
    dataclasses.replace(
        row,
        sources={
            name: shape.replace("Q/", "Q2/") if "q_proj" in name else shape for name, shape in row.sources.items()
        },
    )
    for row in beside_linear(ATTENTION)
)

# A gated delta network (arXiv:2412.06464) without its input projections.
_RECURRENCE = recurrence({"conv1d": "DK/tp+DK/tp+DV/tp"}, norm="norm", out="out_proj")


_LAYERS = (*ENDS, *NORMS, *_GATED_ATTENTION, *GATED_MLP, *_RECURRENCE)
_EXPERTS = (*EXPERTS, *QWEN2_SHARED_EXPERT)
# The fused projections of Qwen3-Next have the rows of each key head, and of its value heads, together.
_FUSED = projections("DK", {"in_proj_qkvz": "DK/tp+DK/tp+DV/tp+DV/tp"}, {"in_proj_ba": "DH+DH"})
_SEPARATE = projections(
    "",
    {"in_proj_qkv": "DK/tp+DK/tp+DV/tp", "in_proj_z": "DV/tp"},
    {"in_proj_b": "DH", "in_proj_a": "DH"},
)
_FLAGS: Flags = {
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "qk_norm": True,
    # No row asks for this flag: transformers has no such model without the gate.
    "gated": ("attn_output_gate", True),
}
# The only multi-token-prediction layer, which shares the model's embedding and head.
_PREDICTING = (
    *(row for row in PREDICTING if row.where == "last"),
    *(
        Row({f"mtp.{name}.weight": shape}, parallel=f"{local}.weight", where="predicting")
        for name, shape, local in (
            ("pre_fc_norm_embedding", "H", "enorm"),
            ("pre_fc_norm_hidden", "H", "hnorm"),
            ("fc", "H HH", "eh_proj"),
            ("norm", "H", "shared_head.norm"),
        )
    ),
)

QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3Next",
    (*_LAYERS, *_FUSED, *_EXPERTS),
    _FLAGS,
    predicting=_PREDICTING,
    prediction="mtp.layers.0.",
)
QWEN3_5_TEXT = dataclasses.replace(QWEN3_NEXT, name="qwen3_5_text", class_prefix="Qwen3_5", rows=(*_LAYERS, *_SEPARATE))
QWEN3_5_MOE_TEXT = dataclasses.replace(
    QWEN3_NEXT, name="qwen3_5_moe_text", class_prefix="Qwen3_5Moe", rows=(*_LAYERS, *_SEPARATE, *_EXPERTS)
)
