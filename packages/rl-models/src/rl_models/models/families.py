"""The known model families: what a Hugging Face config of each means for the numbers.

A family is one row of `FAMILIES`. Which tensors it has and how they are split is the business of the family of the same
name in `ckpt`; here stands what the decoder layers need to know. What a config does not say is what transformers' own
config of the family says then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from parallel_layers.attention.latent import LatentConfig
from parallel_layers.moe import MoEConfig

Windows = tuple[int | None, ...]

# What a flag is: True, False, the config field that decides (absent: False), or the field and what it is if absent.
Flag = bool | str | tuple[str, bool]


def _no_windows(config: Mapping[str, Any]) -> Windows:
    return (None,) * int(config["num_hidden_layers"])


def _qwen_windows(config: Mapping[str, Any]) -> Windows:
    """Sliding windows are switched on by `use_sliding_window` and begin at layer `max_window_layers`."""
    count = int(config["num_hidden_layers"])
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if window is None:
        return (None,) * count
    first = int(config.get("max_window_layers", 28))
    types = config.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)


def _mistral_windows(config: Mapping[str, Any], unsaid: int | None = 4096) -> Windows:
    """One sliding window for every layer, or none."""
    window = config.get("sliding_window", unsaid)
    return (None if window is None else int(window),) * int(config["num_hidden_layers"])


def _mistral_windows_if_used(config: Mapping[str, Any]) -> Windows:
    """One sliding window for every layer, switched on by `use_sliding_window`."""
    return _mistral_windows(config) if config.get("use_sliding_window") else _no_windows(config)


def _mixtral_windows(config: Mapping[str, Any]) -> Windows:
    """One sliding window for every layer, or none."""
    return _mistral_windows(config, None)


def _experts(config: Mapping[str, Any]) -> int | None:
    """Their number, by the names that configs have given it."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((config[name] for name in names if config.get(name) is not None), None)


def _qwen3_moe(config: Mapping[str, Any], layer: int) -> MoEConfig | None:
    """Every `decoder_sparse_step`th layer, but for `mlp_only_layers`."""
    experts = _experts(config)
    if not experts or layer in (config.get("mlp_only_layers") or ()):
        return None
    if (layer + 1) % int(config.get("decoder_sparse_step") or 1):
        return None
    return MoEConfig(
        num_experts=int(experts),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        normalize_top_k=bool(config.get("norm_topk_prob", False)),
        activation=str(config.get("hidden_act", "silu")),
    )


def _mixtral(config: Mapping[str, Any], layer: int) -> MoEConfig | None:
    """Every layer; the scores of a token's experts always add up to one."""
    return MoEConfig(
        num_experts=int(_experts(config) or 8),
        top_k=int(config.get("num_experts_per_tok", 2)),
        intermediate_size=int(config["intermediate_size"]),
        activation=str(config.get("hidden_act", "silu")),
    )


def _deepseek_v3(config: Mapping[str, Any], layer: int) -> MoEConfig | None:
    """From layer `first_k_dense_replace` on."""
    if layer < int(config.get("first_k_dense_replace") or 0):
        return None
    size = int(config["moe_intermediate_size"])
    return MoEConfig(
        num_experts=int(config["n_routed_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=size,
        scoring="sigmoid",
        normalize_top_k=bool(config.get("norm_topk_prob", True)),
        routed_scaling_factor=float(config.get("routed_scaling_factor", 2.5)),
        correction_bias=True,
        num_groups=int(config.get("n_group", 8) or 1),
        top_k_groups=int(config.get("topk_group", 4) or 1),
        shared_intermediate_size=int(config.get("n_shared_experts") or 0) * size,
        activation=str(config.get("hidden_act", "silu")),
    )


def _latent(config: Mapping[str, Any]) -> LatentConfig:
    """DeepSeek's multi-head latent attention."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return LatentConfig(**{name: int(config[name]) for name in names}, q_lora_rank=config.get("q_lora_rank"))


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: the `model_type` of its configs.
        class_prefix: "Llama" knows LlamaForCausalLM, LlamaForTokenClassification, ...
        qkv_bias, output_bias, mlp_bias: see `Flag`.
        qk_norm: the norm of queries and keys, as `parallel_layers.DecoderConfig` has it.
        gated_mlp: act(gate) · up, or act(up) alone.
        activation: where the config names none.
        explicit_head_dim: the config must state `head_dim`; else it defaults to hidden_size / num_attention_heads.
        windows: config -> the sliding window of every layer, None for full attention.
        layer_types: the values of the config's `layer_types` that `windows` understands.
        moe: config, layer number -> the mixture of experts in that layer, None for an MLP; None: no layer has one.
        latent: config -> multi-head latent attention; None: ordinary attention.
        rotary_interleaved: pairs of neighbouring dims are rotated: a `Flag`.
        rope_theta: where the config states none.
        rope_parameters: likewise.
        reads: fields that other families must not have (`rl_models.models.config.NEUTRAL_VALUES`), and this one reads.
    """

    name: str
    class_prefix: str
    qkv_bias: Flag = False
    output_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: Literal["head", "full"] | None = None
    gated_mlp: bool = True
    activation: str = "silu"
    explicit_head_dim: bool = False
    windows: Callable[[Mapping[str, Any]], Windows] = _no_windows
    layer_types: frozenset[str] = frozenset({"full_attention"})
    moe: Callable[[Mapping[str, Any], int], MoEConfig | None] | None = None
    latent: Callable[[Mapping[str, Any]], LatentConfig] | None = None
    rotary_interleaved: Flag = False
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()

    def flag(self, name: str, config: Mapping[str, Any]) -> bool:
        """Whether `qkv_bias`, `output_bias`, `mlp_bias` or `rotary_interleaved` holds under a config."""
        value: Flag = getattr(self, name)
        if isinstance(value, bool):
            return value
        decides, unsaid = (value, False) if isinstance(value, str) else value
        return bool(config.get(decides, unsaid))

    def rope(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config with rope parameters, whether it states them or not."""
        stated = config.get("rope_parameters") or config.get("rope_scaling")
        theta = config.get("rope_theta") or self.rope_theta
        return {**config, "rope_theta": theta, "rope_parameters": stated or self.rope_parameters}


_EITHER = frozenset({"full_attention", "sliding_attention"})

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", "Llama", qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
        Family(
            "qwen2",
            "Qwen2",
            qkv_bias=True,
            windows=_qwen_windows,
            layer_types=_EITHER,
        ),
        Family(
            "qwen3",
            "Qwen3",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm="head",
            explicit_head_dim=True,
            windows=_qwen_windows,
            layer_types=_EITHER,
        ),
        Family("mistral", "Mistral", windows=_mistral_windows, layer_types=_EITHER),
        Family(
            "mixtral",
            "Mixtral",
            windows=_mixtral_windows,
            layer_types=_EITHER,
            moe=_mixtral,
            rope_theta=1e6,
            reads=frozenset({"num_local_experts", "num_experts"}),
        ),
        Family(
            "qwen3_moe",
            "Qwen3Moe",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm="head",
            windows=_mistral_windows_if_used,
            layer_types=_EITHER,
            moe=_qwen3_moe,
            reads=frozenset({"num_local_experts", "num_experts"}),
        ),
        Family(
            "apertus",
            "Apertus",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm="head",
            gated_mlp=False,
            activation="xielu",
            rope_theta=12e6,
            rope_parameters={
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            moe=_deepseek_v3,
            latent=_latent,
            rotary_interleaved=("rope_interleave", True),
            reads=frozenset({"n_routed_experts"}),
        ),
    )
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config, by `architectures` where given, else by `model_type`.

    Raises:
        ValueError: it is not known; the message lists those that are.
    """
    architectures = config.get("architectures") or []
    for family in FAMILIES.values():
        if architectures:
            if re.sub(r"(For[A-Z]\w*|Model)$", "", str(architectures[0])) == family.class_prefix:
                return family
        elif config.get("model_type") == family.name:
            return family
    known = ", ".join(f"{family.class_prefix}ForCausalLM" for family in FAMILIES.values())
    raise ValueError(
        f"architectures={architectures} with model_type={config.get('model_type')!r} is not supported by "
        f"backend='parallel'; known: {known}"
    )
