"""Families whose layers may have a sliding window and an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallel_layers.model.families.entries import BIASES, all_but_every, from_max_window_layers
from parallel_layers.model.family import Family, SlidingWindow
from parallel_layers.model.fields import Config, count, flag, indices, name, number

_QWEN_WINDOW = SlidingWindow(4096, switched=True, layers=from_max_window_layers(28))


def _has_rope(config: Config, windows: Sequence[int | None]) -> list[bool]:
    """SmolLM3: `no_rope_layers` has 1 for a layer that rotates and 0 for a layer without positions."""
    interval = count("no_rope_layer_interval", default=4)(config)
    stated = indices("no_rope_layers")(config) or [int((i + 1) % interval != 0) for i in range(len(windows))]
    if len(stated) < len(windows):
        raise ValueError(f"the config's no_rope_layers name {len(stated)} of {len(windows)} layers; name every layer")
    return [bool(rotates) for rotates in stated[: len(windows)]]


_GEMMA = {
    **BIASES,
    "head_dim": count("head_dim"),
    "activation": name("hidden_activation", default="gelu_pytorch_tanh"),
    "norm_placement": "sandwich",
    "norm_unit_offset": True,
    "attention_scale": number("query_pre_attn_scalar", default=256, then=lambda size: size**-0.5),
}


def _gemma_ends(softcap: float | None) -> dict[str, Any]:
    return {
        "embedding_scale": count("hidden_size", then=lambda size: size**0.5),
        "logit_softcap": number("final_logit_softcapping", default=softcap, nullable=True),
    }


_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

WINDOWED = (
    Family("mistral", "Mistral", window=SlidingWindow(4096)),
    Family(
        "ministral3",
        "Ministral3",
        {"head_dim": count("head_dim")},
        window=SlidingWindow(),
        rope_theta=1e6,
        rope_parameters=_MINISTRAL3_ROPE,
        also_read=("llama_4_scaling_beta",),
    ),
    Family("phi3", "Phi3", window=SlidingWindow(), partial_rotary_factor=1.0),
    Family("qwen2", "Qwen2", {"attention_bias": True}, window=_QWEN_WINDOW),
    Family("qwen3", "Qwen3", {**BIASES, "qk_norm": "head", "head_dim": count("head_dim")}, window=_QWEN_WINDOW),
    Family(
        "gemma2",
        "Gemma2",
        {**_GEMMA, "attention_softcap": number("attn_logit_softcapping", default=50.0, nullable=True)},
        window=SlidingWindow(4096, layers=all_but_every(2)),
        model=_gemma_ends(30.0),
        tied=True,
    ),
    Family(
        "gemma3_text",
        "Gemma3",
        {**_GEMMA, "qk_norm": "head"},
        window=SlidingWindow(4096, layers=all_but_every(6)),
        rope_theta=1e6,
        sliding_rope=lambda config: {"rope_theta": number("rope_local_base_freq", default=10000.0)(config)},
        model=_gemma_ends(None),
        tied=True,
    ),
    Family(
        "olmo3",
        "Olmo3",
        {**BIASES, "qk_norm": "full", "norm_placement": "post"},
        window=SlidingWindow(4096, layers=all_but_every(4)),
        rope_theta=500000.0,
        # YaRN extends the layers with full attention alone.
        sliding_rope=lambda config: {"rope_theta": 500000.0},
    ),
    Family(
        "smollm3",
        "SmolLM3",
        {**BIASES, "mlp_bias": flag("mlp_bias")},
        window=SlidingWindow(
            switched=True, layers=lambda config, num_layers: [not r for r in _has_rope(config, [None] * num_layers)]
        ),
        rope_theta=2e6,
        rotated=_has_rope,
        tied=True,
        also_read=("no_rope_layers",),
    ),
    Family(
        "exaone4",
        "Exaone4",
        {"qk_norm": "head", "norm_placement": "post"},
        window=SlidingWindow(4096, layers=all_but_every(4)),
        # In a model with windows, layers with full attention do not rotate.
        rotated=lambda config, windows: [
            window is not None or config.get("sliding_window", 4096) is None for window in windows
        ],
    ),
    Family(
        "cohere2",
        "Cohere2",
        {
            **BIASES,
            "normalization": "layer",
            "norm_placement": "parallel",
            "norm_eps": number("layer_norm_eps", default=1e-5),
            "rotary_interleaved": True,
        },
        window=SlidingWindow(4096, layers=all_but_every(4)),
        # Layers with full attention do not rotate.
        rotated=lambda config, windows: [window is not None for window in windows],
        model={"logit_scale": number("logit_scale", default=0.0625)},
        tied=True,
    ),
)
