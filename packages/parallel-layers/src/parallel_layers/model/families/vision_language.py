"""Rows of the table of families: the text parts of vision-language models."""

from __future__ import annotations

from parallel_layers.model.families.entries import BIASES, EXPERTS, from_max_window_layers, routed
from parallel_layers.model.family import Family, Sections, SlidingWindow
from parallel_layers.model.fields import count, flag


def _qwen2(model_type: str, class_prefix: str) -> Family:
    return Family(
        model_type,
        class_prefix,
        {"attention_bias": True},
        window=SlidingWindow(4096, switched=True, layers=from_max_window_layers(80)),
        rope_theta=1e6,
        sections=Sections((16, 24, 24)),
    )


_QWEN3_SECTIONS = Sections((24, 20, 20), interleaved=True)
_GLM_SECTIONS = Sections((8, 12, 12))

VISION_LANGUAGE = (
    _qwen2("qwen2_vl", "Qwen2VL"),
    _qwen2("qwen2_5_vl", "Qwen2_5_VL"),
    Family(
        "qwen3_vl",
        "Qwen3VL",
        {**BIASES, "qk_norm": "head", "head_dim": count("head_dim")},
        rope_theta=500000.0,
        sections=_QWEN3_SECTIONS,
        ties="outer",
    ),
    Family(
        "qwen3_vl_moe",
        "Qwen3VLMoe",
        {**BIASES, "qk_norm": "head"},
        moe={**EXPERTS, "normalize_top_k": True, "input_major_experts": True},
        rope_theta=500000.0,
        sections=_QWEN3_SECTIONS,
        ties="outer",
    ),
    Family(
        "glm4v",
        "Glm4v",
        {"attention_bias": True, "head_dim": None, "norm_placement": "sandwich", "rotary_interleaved": True},
        partial_rotary_factor=1.0,
        sections=_GLM_SECTIONS,
    ),
    Family(
        "glm4v_moe",
        "Glm4vMoe",
        {"attention_bias": flag("attention_bias", default=True)},
        moe=routed(),
        partial_rotary_factor=0.5,
        sections=_GLM_SECTIONS,
    ),
)
