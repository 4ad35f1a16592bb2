"""The table of model families: which fields of a Hugging Face config make which decoder.

A family is one row of `FAMILIES`. Every entry of a row is a constant or a reader of the config (`fields`). Where a
config leaves a field out, the entry has the default of transformers' own config class of the family.
`ckpt.layout.families` has the names and shapes of the family's tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel_layers.model.fields import Config, Field, count, count_or_zero, flag, indices, name, names, number, read
from parallel_layers.rotary import yarn_softmax_scale


@dataclass(frozen=True)
class SlidingWindow:
    """The rule by which the configs of a family give layers a sliding window.

    Attributes:
        default: Tokens where a config has no `sliding_window`; None: full attention.
        switched: The window exists only with `use_sliding_window`.
        by_layer: The layers are those of `layer_types`, or without it those from `max_window_layers` on; False: all.
    """

    default: int | None = None
    switched: bool = False
    by_layer: bool = False


@dataclass(frozen=True)
class Family:
    """One row of `FAMILIES`: an architecture.

    Attributes:
        name: The `model_type` of its configs.
        class_prefix: "Llama" stands for LlamaForCausalLM, LlamaForTokenClassification, ...
        decoder: Fields of `DecoderConfig`, beside and over those of `_DECODER`.
        latent: Fields of `LatentConfig` (multi-head latent attention); None: ordinary attention.
        moe: Fields of `MoEConfig`; None: no layer is a mixture of experts.
        window: The sliding windows; None: full attention in all layers.
        rope_theta: The base of the rotation where a config has none.
        rope_parameters: The rope parameters where a config has none.
    """

    name: str
    class_prefix: str
    decoder: Mapping[str, Any] = field(default_factory=dict)
    latent: Mapping[str, Any] | None = None
    moe: Mapping[str, Any] | None = None
    window: SlidingWindow | None = None
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "decoder", {**_DECODER, **self.decoder})

    @property
    def reads(self) -> frozenset[str]:
        """The config fields that the row reads by a `Field`."""
        entries = [*self.decoder.values(), *(self.latent or {}).values(), *(self.moe or {}).values()]
        return frozenset(name for entry in entries if isinstance(entry, Field) for name in entry.names)

    def windows(self, config: Config, num_layers: int) -> tuple[int | None, ...]:
        """Return the sliding window of every layer in tokens, None for full attention.

        Raises:
            ValueError: A layer type that the family does not have, or another number of them than of layers.
        """
        known = {"full_attention"} if self.window is None else {"full_attention", "sliding_attention"}
        types = names("layer_types")(config)
        if unknown := sorted(set(types) - known):
            raise ValueError(f"the config's layer_types {unknown} are not known for {self.name}; use {sorted(known)}")
        if types and len(types) != num_layers:
            raise ValueError(
                f"the config's layer_types name {len(types)} layers, but num_hidden_layers={num_layers}; write one "
                "type for each layer"
            )
        rule = self.window
        # A null window is none.
        if rule is None or config.get("sliding_window", rule.default) is None:
            return (None,) * num_layers
        if rule.switched and not flag("use_sliding_window")(config):
            return (None,) * num_layers
        window = count("sliding_window", default=rule.default)(config)
        first = count_or_zero("max_window_layers", default=28)(config)
        windowed = [kind == "sliding_attention" for kind in types] or [i >= first for i in range(num_layers)]
        return tuple(window if there or not rule.by_layer else None for there in windowed)

    def experts(self, config: Config, num_layers: int) -> tuple[dict[str, Any] | None, ...]:
        """Return the fields of `MoEConfig` for every layer, None for an MLP.

        The mixtures are the layers from `first_k_dense_replace` on, every `decoder_sparse_step`th of them, without
        `mlp_only_layers`.
        """
        if self.moe is None or not read(self.moe["num_experts"], config):
            return (None,) * num_layers
        first, step = (count_or_zero(each)(config) for each in ("first_k_dense_replace", "decoder_sparse_step"))
        dense = indices("mlp_only_layers")(config)
        fields = values(self.moe, config)
        mixtures = (i >= first and i not in dense and (i + 1) % (step or 1) == 0 for i in range(num_layers))
        return tuple(fields if mixture else None for mixture in mixtures)

    def rope(self, config: Config) -> dict[str, Any]:
        """Return the fields that `RotaryEmbedding.from_config` reads, stated or not."""
        stated = config.get("rope_parameters") or config.get("rope_scaling") or self.rope_parameters
        theta = config.get("rope_theta") or self.rope_theta
        return {name: config.get(name) for name in _ROPE_FIELDS} | {"rope_theta": theta, "rope_parameters": stated}


def values(entries: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the entries of a row under a config."""
    return {name: read(value, config) for name, value in entries.items()}


def _yarn_scale(config: Config) -> float:
    head_dim = count("qk_nope_head_dim")(config) + count("qk_rope_head_dim")(config)
    return yarn_softmax_scale(head_dim, config.get("rope_parameters") or config.get("rope_scaling"))


def _shared_experts(config: Config) -> int:
    return int(count_or_zero("n_shared_experts")(config) * count("moe_intermediate_size")(config))


# Every family's entries, unless its row has others.
_DECODER: dict[str, Any] = {
    "hidden_size": count("hidden_size"),
    "num_heads": count("num_attention_heads"),
    "num_kv_heads": count("num_key_value_heads", default=count("num_attention_heads")),
    "head_dim": count("head_dim", default=None),
    "intermediate_size": count("intermediate_size"),
    "norm_eps": number("rms_norm_eps"),
    "activation": name("hidden_act", default="silu"),
}
_BIASES = {"attention_bias": flag("attention_bias"), "output_bias": flag("attention_bias")}
_EXPERTS = {
    "num_experts": count_or_zero("num_local_experts", "num_experts"),
    "top_k": count("num_experts_per_tok"),
    "intermediate_size": count("moe_intermediate_size"),
    "normalize_top_k": flag("norm_topk_prob"),
    "activation": name("hidden_act", default="silu"),
}
# Beside the base and the parameters of the rotation.
_ROPE_FIELDS = (
    *("head_dim", "hidden_size", "num_attention_heads", "qk_rope_head_dim", "partial_rotary_factor"),
    *("max_position_embeddings", "original_max_position_embeddings"),
)
_QWEN_WINDOW = SlidingWindow(4096, switched=True, by_layer=True)
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
            {
                **_BIASES,
                "head_dim": None,
                "attention_scale": _yarn_scale,
                "rotary_interleaved": flag("rope_interleave", default=True),
            },
            latent={
                "kv_lora_rank": count("kv_lora_rank"),
                "qk_nope_head_dim": count("qk_nope_head_dim"),
                "qk_rope_head_dim": count("qk_rope_head_dim"),
                "v_head_dim": count("v_head_dim"),
                "q_lora_rank": count("q_lora_rank", default=None),
            },
            moe={
                **_EXPERTS,
                "num_experts": count("n_routed_experts"),
                "scoring": "sigmoid",
                "normalize_top_k": flag("norm_topk_prob", default=True),
                "routed_scaling_factor": number("routed_scaling_factor", default=2.5),
                "correction_bias": True,
                "num_groups": count("n_group", default=8),
                "top_k_groups": count("topk_group", default=4),
                "shared_intermediate_size": _shared_experts,
            },
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
