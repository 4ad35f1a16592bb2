"""Families whose layers have Mamba-2 beside attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from parallel_layers.linear_attention.config import Mamba2Config
from parallel_layers.model.families.entries import GRANITE, GRANITE_ENDS, WIDE_EXPERTS
from parallel_layers.model.family import Family, values
from parallel_layers.model.fields import Config, Field, count, count_or_zero, flag, names, number

# Older names of layers.
_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


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
    return {"layer_types": [_LAYER_TYPES.get(kind, kind) for kind in types]}


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
)
