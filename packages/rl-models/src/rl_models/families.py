"""The known model families: what a Hugging Face config of each means for the numbers.

A family is one row of `FAMILIES`. Which tensors it has and how they are split is the business of the family of the same
name in `ckpt`; here stands what the decoder layers need to know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Windows = tuple[int | None, ...]


def _no_windows(config: Mapping[str, Any]) -> Windows:
    return (None,) * int(config["num_hidden_layers"])


def _qwen_windows(config: Mapping[str, Any]) -> Windows:
    """Sliding windows are switched on by `use_sliding_window` and begin at layer `max_window_layers`."""
    count = int(config["num_hidden_layers"])
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if window is None:
        return (None,) * count
    first = int(config.get("max_window_layers", 28))
    types = config.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)


def _mistral_windows(config: Mapping[str, Any]) -> Windows:
    """One sliding window for every layer, or none."""
    window = config.get("sliding_window")
    return (None if window is None else int(window),) * int(config["num_hidden_layers"])


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: the `model_type` of its configs.
        class_prefix: "Llama" knows LlamaForCausalLM, LlamaForTokenClassification, ...
        qkv_bias, output_bias, mlp_bias: True, False, or the config field that decides (absent: False).
        qk_norm: the norm of queries and keys, as `parallel_layers.DecoderConfig` has it.
        explicit_head_dim: the config must state `head_dim`; else it defaults to hidden_size / num_attention_heads.
        windows: config -> the sliding window of every layer, None for full attention.
        layer_types: the values of the config's `layer_types` that `windows` understands.
    """

    name: str
    class_prefix: str
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: Literal["head", "full"] | None = None
    explicit_head_dim: bool = False
    windows: Callable[[Mapping[str, Any]], Windows] = _no_windows
    layer_types: frozenset[str] = frozenset({"full_attention"})

    def flag(self, name: str, config: Mapping[str, Any]) -> bool:
        """Whether `qkv_bias`, `output_bias` or `mlp_bias` holds under a config."""
        value = getattr(self, name)
        return bool(config.get(value, False)) if isinstance(value, str) else bool(value)


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
