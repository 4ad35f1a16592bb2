"""Families whose layers have Mamba-2, beside attention: Granite's hybrids and Nemotron-H."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from parallel_layers.linear_attention.config import Mamba2Config
from parallel_layers.model.families.entries import GRANITE, GRANITE_ENDS, WIDE_EXPERTS, routed
from parallel_layers.model.family import Family, values
from parallel_layers.model.fields import Config, Field, count, count_or_zero, flag, name, names, number

# Older names of layers.
_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _limit(value: Any) -> float:
    # transformers writes infinity in this form.
    return float(value["__float__"] if isinstance(value, Mapping) else value)


_STEP_LIMIT = Field(
    lambda limits: isinstance(limits, list | tuple) and len(limits) == 2,
    "two numbers",
    "time_step_limit",
    default=(0.0, math.inf),
    then=lambda limits: tuple(map(_limit, limits)),
)
_GRANITE_MAMBA = {
    "num_heads": count("mamba_n_heads"),
    "head_dim": count("mamba_d_head"),
    "num_groups": count("mamba_n_groups", default=1),
    "state_size": count("mamba_d_state", default=256),
    "conv_kernel_size": count("mamba_d_conv", default=4),
    "conv_bias": flag("mamba_conv_bias", default=True),
    "projection_bias": flag("mamba_proj_bias"),
    "step_limit": _STEP_LIMIT,
    "norm_eps": number("rms_norm_eps", default=1e-6),
}
_SHARED_MLP = count("shared_intermediate_size", default=1024)


def _granite_mamba(config: Config) -> dict[str, Any]:
    # Its convolution has the activation of the MLP.
    Field(("silu", "swish").__contains__, "'silu'", "hidden_act", default="silu")(config)
    return {"linear_attention": Mamba2Config(**values(_GRANITE_MAMBA, config))}


def _granite_layers(config: Config) -> dict[str, Any]:
    types = names("layer_types", "layers_block_type")(config)
    fields: dict[str, Any] = {"layer_types": [_LAYER_TYPES.get(kind, kind) for kind in types]}
    if config.get("mamba_d_head") == "auto":
        expand = count("mamba_expand", default=2)(config)
        fields["mamba_d_head"] = expand * count("hidden_size")(config) // count("mamba_n_heads")(config)
    return fields


_NEMOTRON_MAMBA = {
    "num_heads": count("mamba_num_heads"),
    "head_dim": count("mamba_head_dim"),
    "num_groups": count("n_groups", "mamba_n_groups", default=8),
    "state_size": count("ssm_state_size", default=128),
    "conv_kernel_size": count("conv_kernel", "mamba_d_conv", default=4),
    "conv_bias": flag("use_conv_bias", "mamba_conv_bias", default=True),
    "projection_bias": flag("use_bias"),
    "step_limit": number("time_step_min", "mamba_dt_min", default=0.001, then=lambda least: (least, math.inf)),
    "norm_eps": number("layer_norm_epsilon", default=1e-5),
}


def _nemotron_mamba(config: Config) -> dict[str, Any]:
    Field(("silu", "swish").__contains__, "'silu'", "mamba_hidden_act", default="silu")(config)
    return {"linear_attention": Mamba2Config(**values(_NEMOTRON_MAMBA, config))}


def _nemotron_layers(config: Config) -> dict[str, Any]:
    """Return the type of each layer, which configs name, or older ones have as the letters of a pattern."""
    types = names("layers_block_type", "layer_types")(config)
    if not types:
        types = name("hybrid_override_pattern")(config)
        if unknown := sorted(set(types) - _LETTERS.keys()):
            raise ValueError(f"the config's hybrid_override_pattern has {unknown}; a layer is one of {[*_LETTERS]}")
    types = [_LETTERS.get(kind) or _LAYER_TYPES.get(kind, kind) for kind in types]
    if "moe" in types and flag("mlp_bias")(config):
        raise ValueError("the config's mlp_bias=True with layers of experts, whose projections have no bias here")
    return {"layer_types": types, "num_hidden_layers": len(types)}


MAMBA2 = (
    Family(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        {**GRANITE, "intermediate_size": _SHARED_MLP},
        moe={
            **WIDE_EXPERTS,
            "num_experts": count_or_zero("num_local_experts", default=8),
            "top_k": count("num_experts_per_tok", default=2),
            "shared_intermediate_size": _SHARED_MLP,
        },
        model=GRANITE_ENDS,
        linear=_granite_mamba,
        attends=lambda config, num_layers: [False] * num_layers,
        rotated=lambda config, windows: [config.get("position_embedding_type") == "rope"] * len(windows),
        derived=_granite_layers,
    ),
    Family(
        "nemotron_h",
        "NemotronH",
        {
            "head_dim": count("head_dim", "attention_head_dim", default=128),
            "intermediate_size": count("intermediate_size", default=21504),
            "activation": name("mlp_hidden_act", default="relu2"),
            "gated_mlp": False,
            "mlp_bias": flag("mlp_bias"),
            "norm_eps": number("layer_norm_epsilon", default=1e-5),
        },
        moe=routed(
            num_experts=count("n_routed_experts", "num_local_experts", default=8),
            top_k=count("num_experts_per_tok", default=2),
            intermediate_size=count("moe_intermediate_size", default=7688),
            shared_intermediate_size=count("moe_shared_expert_intermediate_size", default=7688),
            latent_size=count("moe_latent_size", default=0),
            gated=False,
            activation=name("mlp_hidden_act", default="relu2"),
            fp32_router=True,
        ),
        mixtures=lambda config, num_layers: [kind == "moe" for kind in config["layer_types"]],
        linear=_nemotron_mamba,
        one_mixer=True,
        rotated=lambda config, windows: [False] * len(windows),
        derived=_nemotron_layers,
        also_read=("use_bias",),
    ),
)
