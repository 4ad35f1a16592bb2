"""Say how a checkpoint holds its weights in few bits, from its config, and refuse the methods that are not read."""

from collections.abc import Mapping
from typing import Any

from ckpt.layout.config import Config

FIELDS = ("quantization_config", "compression_config")
# Formats of compressed-tensors that store a weight as a tensor of FP8 numbers and a tensor of scales.
_FORMATS = ("float-quantized", "naive-quantized")
_READ = f"fp8, mxfp4, and compressed-tensors with the format {' or '.join(_FORMATS)}"
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
    scheme = next((section[field] for section in sections for field in FIELDS if section.get(field)), None)
    if scheme is None:
        return None
    method = scheme.get("quant_method") if isinstance(scheme, Mapping) else None
    kind = scheme.get("format") if method == "compressed-tensors" else None
    if method in ("fp8", "mxfp4") or kind in _FORMATS:
        return scheme
    named = f"quant_method={method!r:.100}" + ("" if kind is None else f" with format={kind!r:.100}")
    way_out = _WAYS_OUT.get(str(method), f"convert it to plain weights with the library that made it, or {_ORIGINAL}")
    raise ValueError(f"the config's quantization_config has {named}, which is not read; {way_out}. Read are {_READ}")


def with_plain_weights(config: Mapping[str, Any]) -> Config:
    """Return the config of the same model with plain weights, as loads give them."""
    quantization_of(config)
    plain = {name: value for name, value in config.items() if name not in FIELDS}
    if isinstance(inner := config.get("text_config"), Mapping):
        plain["text_config"] = {name: value for name, value in inner.items() if name not in FIELDS}
    return plain
