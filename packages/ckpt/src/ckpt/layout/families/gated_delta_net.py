"""Rows of a gated delta network (arXiv:2412.06464), and OLMo Hybrid, which has such layers beside attention."""

import dataclasses
from collections.abc import Mapping

from ckpt.layout.families.rows import ATTENTION, ENDS, GATED_MLP
from ckpt.layout.families.table import Family, Row


def beside_linear(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return rows of attention for the layers without linear attention, which Megatron-Core's GPTModel lacks."""
    return tuple(dataclasses.replace(row, layers="full", megatron="") for row in rows)


def recurrence(convolutions: Mapping[str, str], *, norm: str, out: str) -> tuple[Row, ...]:
    """Return the rows behind the input projections, by the names in files of convolutions, norm and output."""
    return tuple(
        Row(
            {f"linear_attn.{name}": shape for name, shape in sources.items()},
            parallel=f"linear_attn.{local}",
            layers="linear",
            keep_dtype=wide,
            equal_parts=len(sources) > 1,
        )
        for sources, local, wide in (
            ({f"{name}.weight": f"{rows} L DW" for name, rows in convolutions.items()}, "conv1d.weight", True),
            ({"A_log": "DH/tp"}, "decay.A_log", True),
            ({"dt_bias": "DH/tp"}, "decay.dt_bias", True),
            ({f"{norm}.weight": "DE"}, "norm.weight", False),
            ({f"{out}.weight": "H DV/tp"}, "out_proj.weight", False),
        )
    )


def projections(interleaved: str, *sources: Mapping[str, str]) -> tuple[Row, ...]:
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


# Norms stand before linear attention and its MLP, and behind attention and its MLP. transformers saves two of them
# under other names.
_OLMO_NORMS = (
    Row({"input_layernorm.weight": "H"}, layers="linear", aliases=("attention_layer_norm.weight",)),
    Row({"post_attention_layernorm.weight": "H"}, aliases=("feedforward_layer_norm.weight",)),
    Row({"post_feedforward_layernorm.weight": "H"}, layers="full"),
    Row({"self_attn.q_norm.weight": "Q"}, layers="full"),
    Row({"self_attn.k_norm.weight": "KV"}, layers="full"),
)

OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybrid",
    (
        *ENDS,
        *_OLMO_NORMS,
        *beside_linear(ATTENTION),
        *projections(
            "",
            {"q_proj": "DK/tp", "k_proj": "DK/tp", "v_proj": "DV/tp", "g_proj": "DV/tp"},
            {"b_proj": "DH", "a_proj": "DH"},
        ),
        *recurrence({"q_conv1d": "DK/tp", "k_conv1d": "DK/tp", "v_conv1d": "DV/tp"}, norm="o_norm", out="o_proj"),
        *GATED_MLP,
    ),
    {"qkv_bias": "attention_bias", "o_bias": "attention_bias"},
    # Each fourth layer, and the last of fewer layers.
    attends=lambda config, layer, num_layers: (layer + 1) % min(4, num_layers) == 0,
)
