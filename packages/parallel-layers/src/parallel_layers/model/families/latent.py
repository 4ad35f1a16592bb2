"""Families with multi-head latent attention (DeepSeek)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallel_layers.model.families.entries import BIASES, routed
from parallel_layers.model.family import Family
from parallel_layers.model.fields import Config, Field, count, flag, number
from parallel_layers.rotary.rope_types import yarn_softmax_scale


def _yarn_scale(config: Config) -> float:
    head_dim = count("qk_nope_head_dim")(config) + count("qk_rope_head_dim")(config)
    return yarn_softmax_scale(head_dim, config.get("rope_parameters") or config.get("rope_scaling"))


def _deepseek_v2_groups(field: str) -> Callable[[Config], int]:
    methods: dict[str, Callable[[Config], Any]] = {"greedy": lambda config: 1, "group_limited_greedy": count(field)}
    method = Field(methods.__contains__, f"one of {', '.join(methods)}", "topk_method", default="greedy")
    return lambda config: int(methods[method(config)](config))


_LATENT_ATTENTION = {
    **BIASES,
    "head_dim": None,
    "attention_scale": _yarn_scale,
    "rotary_interleaved": flag("rope_interleave", default=True),
}
LATENT_SIZES = {
    "kv_lora_rank": count("kv_lora_rank"),
    "qk_nope_head_dim": count("qk_nope_head_dim"),
    "qk_rope_head_dim": count("qk_rope_head_dim"),
    "v_head_dim": count("v_head_dim"),
    "q_lora_rank": count("q_lora_rank", default=None),
}

LATENT = (
    Family(
        "deepseek_v2",
        "DeepseekV2",
        {**_LATENT_ATTENTION, "rotary_interleaved": True},
        latent=LATENT_SIZES,
        moe=routed(
            scoring="softmax",
            correction_bias=False,
            # transformers' class never normalises.
            normalize_top_k=Field(lambda value: value is False, "false", "norm_topk_prob", default=False),
            group_score="max",
            num_groups=_deepseek_v2_groups("n_group"),
            top_k_groups=_deepseek_v2_groups("topk_group"),
        ),
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3",
        _LATENT_ATTENTION,
        latent=LATENT_SIZES,
        moe=routed(
            routed_scaling_factor=number("routed_scaling_factor", default=2.5),
            num_groups=count("n_group", default=8),
            top_k_groups=count("topk_group", default=4),
        ),
    ),
    Family(
        "glm4_moe_lite",
        "Glm4MoeLite",
        _LATENT_ATTENTION,
        latent=LATENT_SIZES,
        moe=routed(routed_scaling_factor=number("routed_scaling_factor", default=1.8)),
    ),
)
