"""Families with full attention and an MLP in every layer."""

from __future__ import annotations

from parallel_layers.model.families.entries import BIASES, GRANITE, GRANITE_ENDS
from parallel_layers.model.family import Family
from parallel_layers.model.fields import count, flag, name

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

DENSE = (
    Family("llama", "Llama", {**BIASES, "mlp_bias": flag("mlp_bias")}),
    Family(
        "apertus",
        "Apertus",
        {**BIASES, "qk_norm": "head", "gated_mlp": False, "activation": name("hidden_act", default="xielu")},
        rope_theta=12e6,
        rope_parameters=_LLAMA3_ROPE,
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
    Family("granite", "Granite", {**GRANITE, "mlp_bias": flag("mlp_bias")}, model=GRANITE_ENDS),
    Family("olmo2", "Olmo2", {**BIASES, "qk_norm": "full", "norm_placement": "post"}),
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
)
