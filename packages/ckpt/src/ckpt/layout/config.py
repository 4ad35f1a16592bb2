"""Read a model's configuration from a mapping, an object with `to_dict()` or a checkpoint, and check its fields."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ckpt.files.contents import CONFIG, refuse_adapter, refuse_pointer

Config = dict[str, Any]


@runtime_checkable
class HasToDict(Protocol):
    """A configuration object such as transformers' `PreTrainedConfig`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a plain mapping."""
        ...


ConfigLike = Mapping[str, Any] | HasToDict | str | os.PathLike[str]

# The number of multi-token-prediction layers, which files may hold behind the decoder's.
PREDICTION_LAYERS = "num_nextn_predict_layers"

# The fields of this package, and their other names in configs.
OTHER_NAMES = {
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_k", "num_experts_per_token"),
    "n_shared_experts": ("moe_num_shared_experts",),
    "first_k_dense_replace": ("moe_layer_start_index",),
    "decoder_sparse_step": ("moe_layer_interval",),
    PREDICTION_LAYERS: ("mtp_num_hidden_layers",),
    "layer_types": ("layers_block_type", "hybrid_override_pattern"),
    "head_dim": ("attention_head_dim",),
    "mamba_num_heads": ("mamba_n_heads",),
    "mamba_head_dim": ("mamba_d_head",),
    "n_groups": ("mamba_n_groups",),
    "ssm_state_size": ("mamba_d_state",),
    "conv_kernel": ("mamba_d_conv",),
}
# Older names of layer types, and the letters of patterns.
LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
LAYER_TYPES |= {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}

# The sizes of Kimi Linear's layers with linear attention, and their names in a section of published configs.
LINEAR_SECTION = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}

# Fields that change the tensors or their shapes, with the values that leave the layout unchanged. A field with another
# value is refused unless the family reads the field.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("attention_bias", "qkv_bias", "attention_out_bias", "o_bias", "mlp_bias", "use_bias", "lm_head_bias"),
        (None, False),
    ),
    **dict.fromkeys(("qk_layernorm", "use_qk_norm", "qk_norm", "attn_output_gate"), (None, False)),
    **dict.fromkeys(("attention_k_eq_v", "enable_moe_block"), (None, False)),
    **dict.fromkeys(("num_experts", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), (None, 0)),
    **dict.fromkeys(("shared_expert_intermediate_size", "hidden_size_per_layer_input"), (None, 0)),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "num_kv_shared_layers"), (None, 0)),
    **dict.fromkeys(("moe_layer_freq", "decoder_sparse_step"), (None, 1)),
    **dict.fromkeys(("mlp_only_layers", "cross_attention_layers"), (None, [])),
    "layer_norm_type": (None, "rms"),
}


def classifies_sequences(config: Mapping[str, Any]) -> bool:
    """Return whether the config's class classifies sequences (a reward model); its head has no bias."""
    return any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ())


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, which must be an object."""
    raw = path.read_bytes()
    refuse_pointer(path, raw)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def is_weights(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names a safetensors file."""
    return Path(path).suffix == ".safetensors" and Path(path).is_file()


def load_config(config: ConfigLike) -> Config:
    """Return a copy of the configuration as a dict; for a path, the config.json in the folder or beside the file.

    Raises:
        ValueError: The folder has no config.json, the file is not a JSON object, or `config` is of another type.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, HasToDict):
        return dict(config.to_dict())
    if not isinstance(config, str | os.PathLike):
        kind = type(config).__name__
        raise ValueError(f"the configuration is a {kind}; pass a checkpoint folder, or the model's config")
    path = Path(config)
    folder = path.parent if is_weights(path) else path
    file = folder / CONFIG if folder.is_dir() else folder
    if not file.is_file():
        refuse_adapter(folder)
        raise ValueError(
            f"{file} does not exist; pass a checkpoint folder with a config.json, or the configuration itself"
        )
    return read_json_file(file)


def text_config(config: Config) -> Config:
    """Return the language model's fields: `text_config` (if present) overrides the outer fields; with defaults.

    Fields with several names (`OTHER_NAMES`) have the first name. `num_key_value_heads` defaults to
    `num_attention_heads`; `head_dim` to `hidden_size // num_attention_heads`.
    """
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    text.pop("text_config", None)
    for field, others in OTHER_NAMES.items():
        text[field] = next((text[name] for name in (field, *others) if text.get(name) is not None), None)
    if isinstance(pattern := text["layer_types"], str):
        text["layer_types"] = [*pattern]
    text["layer_types"] = [LAYER_TYPES.get(kind, kind) for kind in names(text, "layer_types")]
    if any(text.get(name) for name in OTHER_NAMES["layer_types"]):
        text["num_hidden_layers"] = len(text["layer_types"])
    text["moe_input_size"] = text.get("moe_latent_size") or text.get("hidden_size")
    if isinstance(section := text.get("linear_attn_config"), Mapping):
        text |= {name: section[other] for name, other in LINEAR_SECTION.items() if other in section}
    if text["mamba_head_dim"] == "auto" and text["mamba_num_heads"]:  # of Granite's hybrids
        text["mamba_head_dim"] = (text.get("mamba_expand") or 2) * text["hidden_size"] // text["mamba_num_heads"]
    if text.get("num_key_value_heads") is None:
        text["num_key_value_heads"] = text.get("num_attention_heads")
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if text.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        text["head_dim"] = None if hidden % heads else hidden // heads
    if any(text.get(name) is not None for name in ("attention_k_eq_v", "global_head_dim", "per_layer_config")):
        text |= _heads_of_full_attention(text)
    return text


def _heads_of_full_attention(text: Config) -> Config:
    """Return the heads of Gemma 4's layers with full attention as published files name them.

    transformers reads these names and writes `per_layer_config`, the heads of each such layer.
    """
    stated = text.get("per_layer_config")
    heads = [
        text.get("global_head_dim"),
        text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None,
    ]
    if isinstance(stated, Mapping):
        pairs = {(layer.get("head_dim"), layer.get("num_key_value_heads")) for layer in stated.values()}
        if len(pairs) != 1:
            raise ValueError(
                f"the config's per_layer_config={stated!r:.100} must give all layers with full attention the same heads"
            )
        heads = [*pairs.pop()]
    size, number = heads
    return {
        "global_head_dim": 512 if size is None else size,
        "num_global_key_value_heads": text["num_key_value_heads"] if number is None else number,
    }


# The largest count of heads or layers and the largest length of a dimension: damaged values above are refused, because
# loops over them would not end.
MOST_COUNT = 100_000
MOST_LENGTH = 1 << 40


def integer(config: Config, field: str) -> int:
    """Return a field that must be a positive integer."""
    value = config.get(field)
    if value is None and field == "head_dim":
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        raise ValueError(
            f"hidden_size={hidden} is not divisible by num_attention_heads={heads}; set head_dim in the config"
        )
    most = MOST_COUNT if field.startswith("num_") else MOST_LENGTH
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"the config's {field}={value!r:.100} must be a positive integer, at most {most:,}")
    return value


def count_or_zero(config: Config, field: str) -> int:
    """Return a count that may be absent (0)."""
    return integer(config, field) if config.get(field) else 0


def is_mixture(config: Config, layer: int) -> bool:
    """Return whether a layer of a model with routed experts has experts."""
    if types := names(config, "mlp_layer_types"):
        return layer < len(types) and types[layer] == "sparse"
    stated = config.get("moe_layer_end_index") not in (None, -1)
    last = count_or_zero(config, "moe_layer_end_index") if stated else integer(config, "num_hidden_layers") - 1
    if not count_or_zero(config, "first_k_dense_replace") <= layer <= last:
        return False
    if layer % (count_or_zero(config, "moe_layer_freq") or 1) or layer in indices(config, "mlp_only_layers"):
        return False
    return (layer + 1) % (count_or_zero(config, "decoder_sparse_step") or 1) == 0


def indices(config: Config, field: str) -> list[int]:
    """Return a list of layers that may be absent (empty)."""
    return _list(config, field, int, "layer indices")


def names(config: Config, field: str) -> list[str]:
    """Return a list of names that may be absent (empty)."""
    return _list(config, field, str, "names")


def _list(config: Config, field: str, kind: type, what: str) -> list[Any]:
    value = config.get(field) or []
    if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
        raise ValueError(f"the config's {field}={value!r:.100} must be a list of {what}")
    return value


def repetitions(config: Mapping[str, Any], field: str, default: int) -> int:
    """Return how often a part of a vision tower is repeated, by a field that is a count or a list."""
    value = config.get(field)
    count = default if value is None else len(value) if isinstance(value, list) else value
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST_COUNT:
        raise ValueError(f"the config's vision_config {field}={value!r:.100} must be a count, or a list")
    return count


def refuse_unread(config: Config, read: frozenset[str], family: str) -> None:
    """Refuse a field that would change the layout in a way that the family's entry does not describe."""
    for field, neutral in NEUTRAL_VALUES.items():
        value = config.get(field)
        if field not in read and not any(value == allowed for allowed in neutral):
            raise ValueError(
                f"the config's {field}={value!r} would change the layout, and the {family} table does not describe it; "
                f"convert the checkpoint to plain weights, or add a row to the family's table"
            )


QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
# Formats of compressed-tensors that store a weight as a tensor of FP8 numbers and a tensor of scales.
_FORMATS = ("float-quantized", "naive-quantized")
_METHODS = f"fp8, mxfp4, and compressed-tensors with the format {' or '.join(_FORMATS)}"
_ORIGINAL = "pass the checkpoint that it was made from (`base_model` in its model card)"
# The advice for a checkpoint of another method.
_WAYS_OUT = {
    "gptq": _ORIGINAL,
    "awq": _ORIGINAL,
    "bitsandbytes": "AutoModelForCausalLM.from_pretrained(DIR).dequantize().save_pretrained(OUT) makes plain weights",
}


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a config's description of weights in few bits; None for plain weights.

    Raises:
        ValueError: The method is not read; names the method and what to do.
    """
    sections = [section for section in (config, config.get("text_config")) if isinstance(section, Mapping)]
    scheme = next((section[field] for section in sections for field in QUANTIZATION_FIELDS if section.get(field)), None)
    if scheme is None:
        return None
    method = scheme.get("quant_method") if isinstance(scheme, Mapping) else None
    kind = scheme.get("format") if method == "compressed-tensors" else None
    if method in ("fp8", "mxfp4") or kind in _FORMATS:
        return scheme
    named = f"quant_method={method!r:.100}" + ("" if kind is None else f" with format={kind!r:.100}")
    way_out = _WAYS_OUT.get(str(method), f"convert it to plain weights with the library that made it, or {_ORIGINAL}")
    raise ValueError(f"the config's quantization_config has {named}, which is not read; {way_out}. Read are {_METHODS}")


def with_plain_weights(config: Mapping[str, Any]) -> Config:
    """Return the config of the same model with plain weights, as loads give them."""
    quantization_of(config)
    plain = {name: value for name, value in config.items() if name not in QUANTIZATION_FIELDS}
    if isinstance(inner := config.get("text_config"), Mapping):
        plain["text_config"] = {name: value for name, value in inner.items() if name not in QUANTIZATION_FIELDS}
    return plain
