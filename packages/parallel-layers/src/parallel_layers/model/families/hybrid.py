"""Families whose layers have linear attention beside full attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from parallel_layers.linear_attention.config import GatedDeltaNetConfig, KimiDeltaConfig
from parallel_layers.model.families.entries import BIASES, EXPERTS, routed
from parallel_layers.model.families.latent import LATENT_SIZES
from parallel_layers.model.family import Family, Sections, values
from parallel_layers.model.fields import Config, Field, count, count_or_zero, flag, indices, name, number

_GATED_DELTA_NET = {
    "num_key_heads": count("linear_num_key_heads"),
    "num_value_heads": count("linear_num_value_heads"),
    "key_head_dim": count("linear_key_head_dim"),
    "value_head_dim": count("linear_value_head_dim"),
    "conv_kernel_size": count("linear_conv_kernel_dim"),
    "activation": name("hidden_act", default="silu"),
    "norm_eps": number("rms_norm_eps"),
}


_KIMI_DELTA_ATTENTION = {
    "num_heads": count("linear_num_heads"),
    "head_dim": count("linear_head_dim"),
    "conv_kernel_size": count("linear_conv_kernel_dim"),
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


def _kimi_delta_attention(config: Config) -> dict[str, Any]:
    """Return the fields of a layer with linear attention, whose sizes published configs have in a section."""
    section = config.get("linear_attn_config") or {}
    named = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim"}
    named["linear_conv_kernel_dim"] = "short_conv_kernel_size"
    config = {**config, **{ours: section[theirs] for ours, theirs in named.items() if theirs in section}}
    # Its convolution has the activation of the MLP.
    Field(("silu", "swish").__contains__, "'silu'", "hidden_act", default="silu")(config)
    return {"linear_attention": KimiDeltaConfig(**values(_KIMI_DELTA_ATTENTION, config))}


def _kimi_shared_experts(config: Config) -> int:
    shared = count("num_shared_experts", "n_shared_experts", default=1)(config)
    return int(shared * count("moe_intermediate_size")(config))


def _as_listed(config: Config, num_layers: int) -> list[bool]:
    """Give the listed layers full attention, counted from 1, or without a list each fourth layer behind the first."""
    section = config.get("linear_attn_config") or {}
    if "full_attn_layers" in section:
        listed = indices("full_attn_layers")(section)
        return [layer + 1 in listed for layer in range(num_layers)]
    return [layer > 0 and layer % 4 == 0 for layer in range(num_layers)]


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

_KIMI_EXPERTS = routed(
    num_experts=count("num_experts", "num_local_experts"),
    top_k=count("num_experts_per_token", "num_experts_per_tok"),
    normalize_top_k=flag("moe_renormalize", "norm_topk_prob", default=True),
    routed_scaling_factor=number("routed_scaling_factor", default=2.446),
    num_groups=count("num_expert_group", "n_group", default=1),
    shared_intermediate_size=_kimi_shared_experts,
    fp32_router=True,
)

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
    Family(
        "kimi_linear",
        "KimiLinear",
        {**BIASES, "head_dim": None},
        latent=LATENT_SIZES,
        moe=_KIMI_EXPERTS,
        linear=_kimi_delta_attention,
        attends=_as_listed,
        rotated=lambda config, windows: [False] * len(windows),
    ),
)
