"""Families whose layers have linear attention beside full attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from parallel_layers.linear_attention.config import GatedDeltaNetConfig
from parallel_layers.model.families.entries import BIASES, EXPERTS
from parallel_layers.model.family import Family, Sections, values
from parallel_layers.model.fields import Config, Field, count, count_or_zero, flag, name, number

_GATED_DELTA_NET = {
    "num_key_heads": count("linear_num_key_heads"),
    "num_value_heads": count("linear_num_value_heads"),
    "key_head_dim": count("linear_key_head_dim"),
    "value_head_dim": count("linear_value_head_dim"),
    "conv_kernel_size": count("linear_conv_kernel_dim"),
    "activation": name("hidden_act", default="silu"),
    "norm_eps": number("rms_norm_eps"),
}


def _gated_delta_net(config: Config) -> dict[str, Any]:
    return {"linear_attention": GatedDeltaNetConfig(**values(_GATED_DELTA_NET, config))}


def _olmo_gated_delta_net(config: Config) -> dict[str, Any]:
    """Return the fields of a layer with linear attention, whose norms stand before attention and MLP."""
    doubled = flag("linear_allow_neg_eigval", default=True)(config)
    # transformers' class has this epsilon, not the config's.
    sizes = values({**_GATED_DELTA_NET, "norm_eps": 1e-5, "negative_eigenvalues": doubled}, config)
    return {"linear_attention": GatedDeltaNetConfig(**sizes), "norm_placement": "pre"}


def _fourth_or_last(config: Config, num_layers: int) -> list[bool]:
    """Give each fourth layer full attention, and the last of fewer layers."""
    return [(i + 1) % min(4, num_layers) == 0 for i in range(num_layers)]


def _unless_null(config: Config, windows: Sequence[int | None]) -> list[bool]:
    """Return whether layers rotate: a base that is null, instead of absent, means no rotation."""
    stated = config.get("rope_parameters") or config
    return [stated.get("rope_theta", 0) is not None] * len(windows)


_DECODER = {
    **BIASES,
    "head_dim": count("head_dim"),
    "qk_norm": "head",
    "norm_unit_offset": True,
    # transformers has no such model without the gate.
    "output_gate": Field(lambda value: value is True, "true", "attn_output_gate", default=True),
}
_EXPERTS = {
    **EXPERTS,
    "num_experts": count_or_zero("num_experts", default=512),
    "normalize_top_k": flag("norm_topk_prob", default=True),
    "shared_intermediate_size": count("shared_expert_intermediate_size", default=512),
    "shared_expert_gate": True,
}
_ALIKE: dict[str, Any] = {"linear": _gated_delta_net, "partial_rotary_factor": 0.25}

_QWEN3_5 = Family("qwen3_5_text", "Qwen3_5", _DECODER, **_ALIKE)
_QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5Moe",
    # Every layer has experts.
    {**_DECODER, "intermediate_size": count("moe_intermediate_size")},
    moe={**_EXPERTS, "num_experts": count("num_experts", default=256), "normalize_top_k": True},
    mixtures=lambda config, num_layers: [True] * num_layers,
    **_ALIKE,
)
_IMAGES: dict[str, Any] = {"sections": Sections((11, 11, 10), interleaved=True), "ties": "outer"}

HYBRID = (
    Family("qwen3_next", "Qwen3Next", _DECODER, moe=_EXPERTS, **_ALIKE),
    _QWEN3_5,
    _QWEN3_5_MOE,
    replace(_QWEN3_5, name="qwen3_5", **_IMAGES),
    replace(_QWEN3_5_MOE, name="qwen3_5_moe", **_IMAGES),
    Family(
        "olmo_hybrid",
        "OlmoHybrid",
        {**BIASES, "qk_norm": "full", "norm_placement": "post"},
        linear=_olmo_gated_delta_net,
        attends=_fourth_or_last,
        rotated=_unless_null,
    ),
)
