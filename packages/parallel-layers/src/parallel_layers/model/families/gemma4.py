"""Gemma 4: full-attention layers have other sizes and numbers of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallel_layers.attention.config import SharedKV
from parallel_layers.model.families.entries import EXPERTS, all_but_every
from parallel_layers.model.family import Family, SlidingWindow
from parallel_layers.model.fields import Config, Field, count, count_or_zero, flag, name, number

# transformers reads the names of published files and writes the names of `per_layer_config`.
_HEADS = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
_ACTIVATION = name("hidden_activation", default="gelu_pytorch_tanh")
_PER_LAYER = count_or_zero("hidden_size_per_layer_input", default=256)
_PER_LAYER_VOCAB = count("vocab_size_per_layer_input", default=262144)
# Text attends to earlier tokens alone, with "vision", too; only the tokens of an image see each other.
_CAUSAL = Field(lambda value: value == "vision", 'null or "vision"', "use_bidirectional_attention", default=None)


def _of_layers(config: Config, sliding: Sequence[bool]) -> list[Mapping[str, Any]]:
    _CAUSAL(config)
    keys_as_values = flag("attention_k_eq_v")(config)
    stated = config.get("per_layer_config")
    if stated is None:
        full = {"head_dim": count("global_head_dim", default=512)(config)}
        if keys_as_values and config.get("num_global_key_value_heads") is not None:
            full["num_kv_heads"] = count("num_global_key_value_heads")(config)
        layer_fields: list[dict[str, Any]] = [{} if slides else full for slides in sliding]
    else:
        layer_fields = [_stated(stated.get(str(layer), stated.get(layer, {}))) for layer in range(len(sliding))]
    double = 2 if flag("use_double_wide_mlp")(config) else 1
    wide = {"intermediate_size": double * count("intermediate_size")(config)}
    return [
        {
            **fields,
            **({} if slides else {"keys_as_values": keys_as_values}),
            **({} if shared is None else {"shared_kv": shared}),
            **(wide if shared == "reuse" else {}),
        }
        for fields, slides, shared in zip(layer_fields, sliding, _shared(config, sliding), strict=True)
    ]


def _shared(config: Config, sliding: Sequence[bool]) -> list[SharedKV | None]:
    """Return `AttentionConfig.shared_kv` of every layer: the last layers reuse the last other layer of their kind."""
    begin = len(sliding) - count_or_zero("num_kv_shared_layers")(config)
    if begin == len(sliding):
        return [None] * len(sliding)
    if begin < 1 or {*sliding[:begin]} != {*sliding}:
        raise ValueError(
            f"the config's num_kv_shared_layers={len(sliding) - begin} of {len(sliding)} layers leaves no layer of "
            "each kind of attention that stores keys and values; use a smaller number"
        )
    stores = {begin - 1 - [*reversed(sliding[:begin])].index(kind) for kind in (False, True) if kind in sliding}
    return ["reuse" if i >= begin else "store" if i in stores else None for i in range(len(sliding))]


def _stated(fields: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(fields.keys() - _HEADS.keys()):
        raise ValueError(
            f"the config's per_layer_config has {unknown}; the known fields of a layer are {sorted(_HEADS)}"
        )
    return {_HEADS[field]: count(field)(fields) for field in fields}


GEMMA4 = (
    Family(
        "gemma4_text",
        "Gemma4",
        {
            "head_dim": count("head_dim"),
            "activation": _ACTIVATION,
            "norm_placement": "sandwich",
            "qk_norm": "head",
            "value_norm": True,
            "attention_scale": 1.0,
            "output_scale": True,
            "per_layer_size": _PER_LAYER,
        },
        window=SlidingWindow(512, layers=all_but_every(6), full_last=True),
        rope_theta=1e6,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
        partial_rotary_factor=1.0,
        sliding_rope=lambda config: {"rope_theta": 10000.0},
        of_layers=_of_layers,
        moe={
            **EXPERTS,
            "num_experts": lambda config: count("num_experts")(config) if flag("enable_moe_block")(config) else 0,
            "top_k": count("top_k_experts"),
            "normalize_top_k": True,
            "scaled_router": True,
            # Every layer has an MLP beside its experts.
            "shared_intermediate_size": count("intermediate_size"),
            "branch_norms": True,
            "norm_eps": number("rms_norm_eps"),
            "activation": _ACTIVATION,
        },
        model={
            "embedding_scale": count("hidden_size", then=lambda size: size**0.5),
            "per_layer_vocab_size": lambda config: _PER_LAYER_VOCAB(config) if _PER_LAYER(config) else 0,
            "logit_softcap": number("final_logit_softcapping", default=None, nullable=True),
        },
        tied=True,
        also_read=(
            *("attention_k_eq_v", "enable_moe_block", "num_experts", "num_kv_shared_layers", "use_double_wide_mlp"),
            "use_bidirectional_attention",
        ),
    ),
)
