"""Qwen3-Next and Qwen3.5: layers of gated delta networks beside layers of gated attention."""

import dataclasses
from collections.abc import Mapping

from ckpt.layout.families.rows import ATTENTION, ENDS, EXPERTS, GATED_MLP, NORMS, QWEN2_SHARED_EXPERT
from ckpt.layout.families.table import ROTARY_BUFFERS, Family, Flags, Row

# The rows of q_proj have two parts for each head: its query, and the gate of its output.
_GATED_ATTENTION = tuple(
    dataclasses.replace(
        row,
        layers="full",
        megatron="",
        sources={
            name: shape.replace("Q/", "Q2/") if "q_proj" in name else shape for name, shape in row.sources.items()
        },
    )
    for row in ATTENTION
)


# A gated delta network (arXiv:2412.06464) without its input projections.
_RECURRENCE = tuple(
    Row({f"linear_attn.{name}": shape}, parallel=f"linear_attn.{local or name}", layers="linear", keep_dtype=wide)
    for name, shape, local, wide in (
        ("conv1d.weight", "DK/tp+DK/tp+DV/tp L DW", "", True),
        ("A_log", "DH/tp", "decay.A_log", True),
        ("dt_bias", "DH/tp", "decay.dt_bias", True),
        ("norm.weight", "DE", "", False),
        ("out_proj.weight", "H DV/tp", "", False),
    )
)


def _projections(interleaved: str, *sources: Mapping[str, str]) -> tuple[Row, ...]:
    """Return the rows of the input projections by their names in files: of q, k, v and z, and of b and a."""
    return tuple(
        Row(
            {f"linear_attn.{name}.weight": f"{rows} H" for name, rows in parts.items()},
            parallel=f"linear_attn.{local}.weight",
            layers="linear",
            interleaved=interleaved,
        )
        for local, parts in zip(("in_proj_qkvz", "in_proj_ba"), sources, strict=True)
    )


_LAYERS = (*ENDS, *NORMS, *_GATED_ATTENTION, *GATED_MLP, *_RECURRENCE)
_EXPERTS = (*EXPERTS, *QWEN2_SHARED_EXPERT)
# The fused projections of Qwen3-Next have the rows of each key head, and of its value heads, together.
_FUSED = _projections("DK", {"in_proj_qkvz": "DK/tp+DK/tp+DV/tp+DV/tp"}, {"in_proj_ba": "DH+DH"})
_SEPARATE = _projections(
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
_IGNORED = (ROTARY_BUFFERS, r"^mtp\.")

QWEN3_NEXT = Family("qwen3_next", "Qwen3Next", (*_LAYERS, *_FUSED, *_EXPERTS), _FLAGS, ignored=_IGNORED)
QWEN3_5_TEXT = Family("qwen3_5_text", "Qwen3_5", (*_LAYERS, *_SEPARATE), _FLAGS, ignored=_IGNORED)
QWEN3_5_MOE_TEXT = Family("qwen3_5_moe_text", "Qwen3_5Moe", (*_LAYERS, *_SEPARATE, *_EXPERTS), _FLAGS, ignored=_IGNORED)
