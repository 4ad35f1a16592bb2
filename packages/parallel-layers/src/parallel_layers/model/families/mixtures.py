"""Families with mixtures of experts and ordinary attention."""

from __future__ import annotations

from parallel_layers.mlp.activations import ClampedSwiGLU
from parallel_layers.model.families.entries import (
    BIASES,
    EXPERTS,
    GRANITE,
    GRANITE_ENDS,
    WIDE_EXPERTS,
    all_but_every,
    routed,
)
from parallel_layers.model.family import Family, SlidingWindow
from parallel_layers.model.fields import Config, Field, count, count_or_zero, flag, number


def _clamped_swiglu(config: Config) -> ClampedSwiGLU:
    alpha, limit = number("swiglu_alpha", default=1.702), number("swiglu_limit", default=7.0)
    return ClampedSwiGLU(float(alpha(config)), float(limit(config)))


def _every_other_below_max_window_layers(config: Config, num_layers: int) -> list[bool]:
    end = count_or_zero("max_window_layers", default=28)(config)
    return [i % 2 == 0 and i < end for i in range(num_layers)]


def _minimax_rotary_factor(config: Config) -> float:
    return float(count("rotary_dim", default=count("head_dim"))(config) / count("head_dim")(config))


def _ernie_mixtures(config: Config, num_layers: int) -> list[bool]:
    """ERNIE 4.5: every `moe_layer_interval`th layer from a first to a last layer; -1 is the last layer of the model."""
    first_layer = count_or_zero("moe_layer_start_index", default=1)(config)
    last_layer = Field(
        lambda value: isinstance(value, int) and value >= -1, "a layer or -1", "moe_layer_end_index", default=-1
    )
    step = count("moe_layer_interval", default=1)(config)
    end = num_layers - 1 if last_layer(config) == -1 else last_layer(config)
    return [(i + 1) % step == 0 and first_layer <= i <= end for i in range(num_layers)]


def _ernie_shared_experts(config: Config) -> int:
    return int(count_or_zero("moe_num_shared_experts", default=2)(config) * _ERNIE_WIDTH(config))


_ERNIE_WIDTH = count("moe_intermediate_size", default=1536)
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

MIXTURES = (
    Family(
        "mixtral",
        "Mixtral",
        moe={
            **WIDE_EXPERTS,
            "num_experts": count("num_local_experts", "num_experts", default=8),
            "top_k": count("num_experts_per_tok", default=2),
        },
        window=SlidingWindow(),
        rope_theta=1e6,
    ),
    Family(
        "qwen2_moe",
        "Qwen2Moe",
        {"attention_bias": flag("qkv_bias", default=True)},
        moe={
            **EXPERTS,
            "num_experts": count("num_experts"),
            "shared_intermediate_size": count("shared_expert_intermediate_size", default=5632),
            "shared_expert_gate": True,
        },
        window=SlidingWindow(4096, switched=True, layers=_every_other_below_max_window_layers),
    ),
    Family(
        "qwen3_moe",
        "Qwen3Moe",
        {**BIASES, "qk_norm": "head"},
        moe=EXPERTS,
        window=SlidingWindow(4096, switched=True),
    ),
    Family(
        "glm4_moe",
        "Glm4Moe",
        {
            "attention_bias": flag("attention_bias"),
            "qk_norm": flag("use_qk_norm", then=lambda used: "head" if used else None),
        },
        moe=routed(),
        partial_rotary_factor=0.5,
    ),
    Family(
        "gpt_oss",
        "GptOss",
        {
            "attention_bias": flag("attention_bias", default=True),
            "output_bias": flag("attention_bias", default=True),
            "attention_sinks": True,
            "head_dim": count("head_dim"),
        },
        moe={
            **WIDE_EXPERTS,
            "num_experts": count("num_local_experts"),
            "router_bias": True,
            "expert_bias": True,
            "input_major_experts": True,
            "alternating_gate_up": True,
            "activation": _clamped_swiglu,
        },
        window=SlidingWindow(128, layers=all_but_every(2)),
        rope_theta=150000.0,
        rope_parameters=_GPT_OSS_ROPE,
    ),
    Family(
        "granitemoe",
        "GraniteMoe",
        GRANITE,
        moe={
            **WIDE_EXPERTS,
            "num_experts": count("num_local_experts", default=8),
            "top_k": count("num_experts_per_tok", default=2),
        },
        model=GRANITE_ENDS,
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2",
        {"qk_norm": "full", "head_dim": count("head_dim")},
        moe={
            **WIDE_EXPERTS,
            "num_experts": count("num_local_experts"),
            "scoring": "sigmoid",
            "correction_bias": True,
        },
        rope_theta=5e6,
        partial_rotary_factor=_minimax_rotary_factor,
        also_read=("use_qk_norm",),
    ),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        {"rotary_interleaved": True},
        moe={
            **EXPERTS,
            "num_experts": count("moe_num_experts", "num_experts", default=64),
            "top_k": count("moe_k", "num_experts_per_tok", default=6),
            "intermediate_size": _ERNIE_WIDTH,
            # The weights are divided by their sum, or by this where the sum is less.
            "normalize_top_k": Field(
                lambda value: value == 1e-12, "1e-12", "moe_norm_min", default=1e-12, then=lambda least: True
            ),
            "correction_bias": True,
            "fp32_router": True,
            "shared_intermediate_size": _ernie_shared_experts,
        },
        mixtures=_ernie_mixtures,
        rope_theta=500000.0,
        tied=True,
    ),
)
