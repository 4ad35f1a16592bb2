"""A hybrid family as `build_hybrid` takes it: the letter of each layer, and Megatron-Core's sizes of Mamba-2."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from parallel_layers import ModelConfig
from parallel_layers.linear_attention import Mamba2Config

# Smaller steps count for nothing.
_LEAST_STEP = 1e-6
# Fields of Mamba-2, and the values that are fixed in Megatron-Core.
_FIXED = {"conv_kernel_size": 4, "conv_bias": True, "projection_bias": False, "norm_eps": 1e-5}


class HybridDescription(NamedTuple):
    """The arguments of `build_hybrid` for a family of hybrids.

    Attributes:
        model: The description with the same attention in every layer.
        pattern: The letter of each layer.
        options: The sizes of Mamba-2, fields of `TransformerConfig`.
    """

    model: ModelConfig
    pattern: str
    options: dict[str, Any]


def describe_hybrid(model: ModelConfig, tp: int) -> HybridDescription:
    """Return the arguments of `build_hybrid` for a model with one mixer a layer (Nemotron-H).

    Raises:
        ValueError: Megatron-Core cannot express the model; names the values and the allowed values.
    """
    mamba = next((fields["linear_attention"] for fields in model.own_fields if "linear_attention" in fields), None)
    if not all("mixer" in fields for fields in model.own_fields) or not isinstance(mamba, Mamba2Config):
        raise ValueError(
            f"{model.family} has layers that are no layers of Megatron-Core's HybridModel: each has a mixer and an "
            "MLP, where HybridModel's is one of them, behind one norm; use backend='parallel', or nemotron_h"
        )
    limit = mamba.step_limit
    misfits = {
        **{f"{name}={getattr(mamba, name)!r}": getattr(mamba, name) != value for name, value in _FIXED.items()},
        f"time_step_min={limit[0]} (1e-9 in config.json computes as Megatron-Core does)": limit[0] > _LEAST_STEP,
        f"a largest step of {limit[1]}": limit[1] < math.inf,
        "mlp_bias=True": model.decoder.mlp_bias,
        "moe_latent_size": any(moe is not None and moe.latent_size > 0 for moe in model.moe),
    }
    if refused := [name for name, holds in misfits.items() if holds]:
        allowed = ", ".join(f"{name}={value!r}" for name, value in _FIXED.items())
        raise ValueError(
            f"{model.family} has {'; '.join(refused)}, which is not supported on Megatron-Core: its Mamba-2 has "
            f"{allowed} and no limit of the steps; use backend='parallel'"
        )
    if mamba.num_groups % tp:
        fits = [n for n in range(1, mamba.num_groups + 1) if mamba.num_groups % n == 0]
        raise ValueError(f"n_groups={mamba.num_groups} of Mamba-2 does not divide over tp={tp}; use tp in {fits}")
    letters = (
        "M" if "linear_attention" in fields else "*" if fields["mixer"] == "attention" else "-" if moe is None else "E"
        for fields, moe in zip(model.own_fields, model.moe, strict=True)
    )
    return HybridDescription(
        dataclasses.replace(model, own_fields=({},) * model.num_layers),
        "".join(letters),
        {
            "mamba_num_heads": mamba.num_heads,
            "mamba_head_dim": mamba.head_dim,
            "mamba_num_groups": mamba.num_groups,
            "mamba_state_dim": mamba.state_size,
        },
    )
