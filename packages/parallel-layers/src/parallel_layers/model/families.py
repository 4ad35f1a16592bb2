"""The table of model families: which fields of a Hugging Face config make which decoder.

A family is one row of `FAMILIES`. Every entry of a row is a constant or a reader of the config (`fields`). Where a
config leaves a field out, the entry has the default of transformers' own config class of the family.
`ckpt.layout.families` has the names and shapes of the family's tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from parallel_layers.model.family import Family, SlidingWindow
from parallel_layers.model.fields import Config, Field, count, count_or_zero, flag, indices, name, names, number
from parallel_layers.moe import ClampedSwiGLU
from parallel_layers.rotary import yarn_softmax_scale


def _yarn_scale(config: Config) -> float:
    head_dim = count("qk_nope_head_dim")(config) + count("qk_rope_head_dim")(config)
    return yarn_softmax_scale(head_dim, config.get("rope_parameters") or config.get("rope_scaling"))


def _shared_experts(config: Config) -> int:
    return int(count_or_zero("n_shared_experts")(config) * count("moe_intermediate_size")(config))


_BIASES = {"attention_bias": flag("attention_bias"), "output_bias": flag("attention_bias")}
_EXPERTS = {
    "num_experts": count_or_zero("num_local_experts", "num_experts"),
    "top_k": count("num_experts_per_tok"),
    "intermediate_size": count("moe_intermediate_size"),
    "normalize_top_k": flag("norm_topk_prob"),
    "activation": name("hidden_act", default="silu"),
}


def _routed(**changes: Any) -> dict[str, Any]:
    """Return the entries of DeepSeek-V3's routed and shared experts, with these changes."""
    return {
        **_EXPERTS,
        "num_experts": count("n_routed_experts"),
        "scoring": "sigmoid",
        "normalize_top_k": flag("norm_topk_prob", default=True),
        "routed_scaling_factor": number("routed_scaling_factor", default=1.0),
        "correction_bias": True,
        "num_groups": count("n_group", default=1),
        "top_k_groups": count("topk_group", default=1),
        "shared_intermediate_size": _shared_experts,
        **changes,
    }


def _clamped_swiglu(config: Config) -> ClampedSwiGLU:
    alpha, limit = number("swiglu_alpha", default=1.702), number("swiglu_limit", default=7.0)
    return ClampedSwiGLU(float(alpha(config)), float(limit(config)))


def _has_rope(config: Config, windows: Sequence[int | None]) -> list[bool]:
    """SmolLM3: `no_rope_layers` has 1 for a layer that rotates and 0 for a layer without positions."""
    every = count("no_rope_layer_interval", default=4)(config)
    stated = indices("no_rope_layers")(config) or [int((i + 1) % every != 0) for i in range(len(windows))]
    if len(stated) < len(windows):
        raise ValueError(f"the config's no_rope_layers name {len(stated)} of {len(windows)} layers; name every layer")
    return [bool(rotates) for rotates in stated[: len(windows)]]


_GEMMA = {
    **_BIASES,
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


_GRANITE = {
    **_BIASES,
    "attention_scale": number("attention_multiplier", default=1.0),
    "residual_multiplier": number("residual_multiplier", default=1.0),
}
_GRANITE_ENDS = {
    "embedding_scale": number("embedding_multiplier", default=1.0),
    "logit_scale": number("logits_scaling", default=1.0, then=lambda divisor: 1 / divisor),
}
_LATENT_ATTENTION = {
    **_BIASES,
    "head_dim": None,
    "attention_scale": _yarn_scale,
    "rotary_interleaved": flag("rope_interleave", default=True),
}
_LATENT = {
    "kv_lora_rank": count("kv_lora_rank"),
    "qk_nope_head_dim": count("qk_nope_head_dim"),
    "qk_rope_head_dim": count("qk_rope_head_dim"),
    "v_head_dim": count("v_head_dim"),
    "q_lora_rank": count("q_lora_rank", default=None),
}


def _all_but_every(period: int) -> Callable[[Config, int], list[bool]]:
    """Return a rule: each `period`-th layer sees all tokens, and the others have a window."""
    stated = count("sliding_window_pattern", default=period)
    return lambda config, num_layers: [(i + 1) % stated(config) != 0 for i in range(num_layers)]


def _from_max_window_layers(config: Config, num_layers: int) -> list[bool]:
    first = count_or_zero("max_window_layers", default=28)(config)
    return [i >= first for i in range(num_layers)]


def _every_other_below_max_window_layers(config: Config, num_layers: int) -> list[bool]:
    end = count_or_zero("max_window_layers", default=28)(config)
    return [i % 2 == 0 and i < end for i in range(num_layers)]


_QWEN_WINDOW = SlidingWindow(4096, switched=True, layers=_from_max_window_layers)
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _deepseek_v2_groups(field: str) -> Callable[[Config], int]:
    methods: dict[str, Callable[[Config], Any]] = {"greedy": lambda config: 1, "group_limited_greedy": count(field)}
    method = Field(methods.__contains__, f"one of {', '.join(methods)}", "topk_method", default="greedy")
    return lambda config: int(methods[method(config)](config))


def _minimax_rotary_factor(config: Config) -> float:
    return float(count("rotary_dim", default=count("head_dim"))(config) / count("head_dim")(config))


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", "Llama", {**_BIASES, "mlp_bias": flag("mlp_bias")}),
        Family("qwen2", "Qwen2", {"attention_bias": True}, window=_QWEN_WINDOW),
        Family("qwen3", "Qwen3", {**_BIASES, "qk_norm": "head", "head_dim": count("head_dim")}, window=_QWEN_WINDOW),
        Family("mistral", "Mistral", window=SlidingWindow(4096)),
        Family(
            "mixtral",
            "Mixtral",
            moe={
                **_EXPERTS,
                "num_experts": count("num_local_experts", "num_experts", default=8),
                "top_k": count("num_experts_per_tok", default=2),
                "intermediate_size": count("intermediate_size"),
                "normalize_top_k": True,
            },
            window=SlidingWindow(),
            rope_theta=1e6,
        ),
        Family(
            "qwen3_moe",
            "Qwen3Moe",
            {**_BIASES, "qk_norm": "head"},
            moe=_EXPERTS,
            window=SlidingWindow(4096, switched=True),
        ),
        Family(
            "apertus",
            "Apertus",
            {**_BIASES, "qk_norm": "head", "gated_mlp": False, "activation": name("hidden_act", default="xielu")},
            rope_theta=12e6,
            rope_parameters=_LLAMA3_ROPE,
        ),
        Family("olmo2", "Olmo2", {**_BIASES, "qk_norm": "full", "norm_placement": "post"}),
        Family(
            "deepseek_v3",
            "DeepseekV3",
            _LATENT_ATTENTION,
            latent=_LATENT,
            moe=_routed(
                routed_scaling_factor=number("routed_scaling_factor", default=2.5),
                num_groups=count("n_group", default=8),
                top_k_groups=count("topk_group", default=4),
            ),
        ),
        Family(
            "glm4",
            "Glm4",
            {
                "attention_bias": flag("attention_bias", default=True),
                "head_dim": count("head_dim"),
                "norm_placement": "sandwich",
                "rotary_interleaved": True,
            },
            partial_rotary_factor=0.5,
        ),
        Family(
            "glm4_moe",
            "Glm4Moe",
            {
                "attention_bias": flag("attention_bias"),
                "qk_norm": flag("use_qk_norm", then=lambda used: "head" if used else None),
            },
            moe=_routed(),
            partial_rotary_factor=0.5,
        ),
        Family(
            "glm4_moe_lite",
            "Glm4MoeLite",
            _LATENT_ATTENTION,
            latent=_LATENT,
            moe=_routed(routed_scaling_factor=number("routed_scaling_factor", default=1.8)),
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
                **_EXPERTS,
                "num_experts": count("num_local_experts"),
                "intermediate_size": count("intermediate_size"),
                "normalize_top_k": True,
                "router_bias": True,
                "expert_bias": True,
                "input_major_experts": True,
                "activation": _clamped_swiglu,
            },
            window=SlidingWindow(128, layers=_all_but_every(2)),
            rope_theta=150000.0,
            rope_parameters=_GPT_OSS_ROPE,
        ),
        Family(
            "gemma2",
            "Gemma2",
            {**_GEMMA, "attention_softcap": number("attn_logit_softcapping", default=50.0, nullable=True)},
            window=SlidingWindow(4096, layers=_all_but_every(2)),
            model=_gemma_ends(30.0),
            tied=True,
        ),
        Family(
            "gemma3_text",
            "Gemma3",
            {**_GEMMA, "qk_norm": "head"},
            window=SlidingWindow(4096, layers=_all_but_every(6)),
            rope_theta=1e6,
            sliding_rope=lambda config: {"rope_theta": number("rope_local_base_freq", default=10000.0)(config)},
            model=_gemma_ends(None),
            tied=True,
        ),
        Family(
            "olmo3",
            "Olmo3",
            {**_BIASES, "qk_norm": "full", "norm_placement": "post"},
            window=SlidingWindow(4096, layers=_all_but_every(4)),
            rope_theta=500000.0,
            # YaRN extends the layers with full attention alone.
            sliding_rope=lambda config: {"rope_theta": 500000.0},
        ),
        Family(
            "smollm3",
            "SmolLM3",
            {**_BIASES, "mlp_bias": flag("mlp_bias")},
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
            window=SlidingWindow(4096, layers=_all_but_every(4)),
            # In a model with windows, layers with full attention do not rotate.
            rotated=lambda config, windows: [
                window is not None or config.get("sliding_window", 4096) is None for window in windows
            ],
        ),
        Family("granite", "Granite", {**_GRANITE, "mlp_bias": flag("mlp_bias")}, model=_GRANITE_ENDS),
        Family(
            "granitemoe",
            "GraniteMoe",
            _GRANITE,
            moe={
                **_EXPERTS,
                "num_experts": count("num_local_experts", default=8),
                "top_k": count("num_experts_per_tok", default=2),
                "intermediate_size": count("intermediate_size"),
                "normalize_top_k": True,
            },
            model=_GRANITE_ENDS,
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2",
            {**_LATENT_ATTENTION, "rotary_interleaved": True},
            latent=_LATENT,
            moe=_routed(
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
            "ernie4_5",
            "Ernie4_5",
            {
                **dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), flag("use_bias")),
                "head_dim": count("head_dim"),
                "rotary_interleaved": True,
            },
            rope_theta=500000.0,
            tied=True,
        ),
        Family(
            "minimax_m2",
            "MiniMaxM2",
            {"qk_norm": "full", "head_dim": count("head_dim")},
            moe={
                **_EXPERTS,
                "num_experts": count("num_local_experts"),
                "intermediate_size": count("intermediate_size"),
                "normalize_top_k": True,
                "scoring": "sigmoid",
                "correction_bias": True,
            },
            rope_theta=5e6,
            partial_rotary_factor=_minimax_rotary_factor,
            also_read=("use_qk_norm",),
        ),
        Family("phi3", "Phi3", window=SlidingWindow()),
        Family(
            "seed_oss",
            "SeedOss",
            {
                "attention_bias": flag("attention_bias", default=True),
                "output_bias": flag("attention_out_bias"),
                "mlp_bias": flag("mlp_bias"),
                "head_dim": count("head_dim"),
            },
            # Published configs keep the dropout of pretraining, which post-training leaves out.
            also_read=("attention_dropout", "residual_dropout"),
        ),
        Family(
            "qwen2_moe",
            "Qwen2Moe",
            {"attention_bias": flag("qkv_bias", default=True)},
            moe={
                **_EXPERTS,
                "num_experts": count("num_experts"),
                "shared_intermediate_size": count("shared_expert_intermediate_size", default=5632),
                "shared_expert_gate": True,
            },
            window=SlidingWindow(4096, switched=True, layers=_every_other_below_max_window_layers),
        ),
    )
}


def family_of(config: Config) -> Family:
    """Return the family of a config, by `architectures` where given, else by `model_type`.

    Raises:
        ValueError: The family is not in the table; the message lists the known ones.
    """
    architectures = names("architectures")(config)
    prefix = re.sub(r"(For[A-Z]\w*|Model)$", "", architectures[0]) if architectures else None
    for family in FAMILIES.values():
        if prefix == family.class_prefix or (prefix is None and config.get("model_type") == family.name):
            return family
    known = ", ".join(f"{family.class_prefix}ForCausalLM" for family in FAMILIES.values())
    given = f"architectures={[*architectures]} with model_type={config.get('model_type')!r}"
    raise ValueError(f"{given} is not supported; known: {known}")
