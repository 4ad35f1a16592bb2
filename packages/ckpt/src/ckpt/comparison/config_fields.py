"""Compare the fields of two configurations that change what a model computes from the same tensors."""

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.comparison.report import Difference
from ckpt.layout.adapter_config import computation
from ckpt.layout.config import OTHER_NAMES, PREDICTION_LAYERS, QUANTIZATION_FIELDS, Config, text_config

# Fields that do not change the outputs of a forward pass, or that the tensors themselves show.
_OTHER_FIELDS = {
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "initializer_range",
    "attention_dropout",
    "hidden_dropout",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
    "pretraining_tp",
    PREDICTION_LAYERS,
    *OTHER_NAMES[PREDICTION_LAYERS],
    *QUANTIZATION_FIELDS,
}
# Fields in which null is a value, not a missing field.
_NULL_IS_A_VALUE = {"sliding_window"}
_ROPE_TYPES = {"mrope": "default", "su": "longrope"}


def config_differences(a: Config, b: Config) -> list[Difference]:
    """Return a difference for every field that both configurations give and that changes what the model computes.

    A field that one side omits is skipped: the default of its class is not known here.
    """
    first, second = (dict(_fields("", _normal(config))) for config in (a, b))
    return [
        Difference(f"config.json {name}", "config", f"{first[name]!r:.100} and {second[name]!r:.100}")
        for name in first
        if name in second and first[name] != second[name]
    ]


def adapter_differences(a: Config, b: Config) -> list[Difference]:
    """Return a difference for every field of two adapters that changes what they compute from the same tensors."""
    first, second = computation(a), computation(b)
    return [
        Difference(f"adapter_config.json {name}", "config", f"{a.get(name)!r:.100} and {b.get(name)!r:.100}")
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    ]


def _normal(config: Config) -> Config:
    """Return the fields of the language model and the vision tower, with rope fields as transformers 5 spells them."""
    text = text_config(config)
    text["model_type"] = config.get("model_type")
    ropes = [text.pop("rope_scaling", None), text.pop("rope_parameters", None)]
    rope = {name: value for section in ropes if isinstance(section, Mapping) for name, value in section.items()}
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    text |= {**rope, "rope_type": _ROPE_TYPES.get(kind, kind) if isinstance(kind, str) else kind}
    if text.get("use_sliding_window") is False:
        text["sliding_window"] = None
    return text


def _fields(prefix: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every field that changes the outputs."""
    for name, value in config.items():
        if name in _OTHER_FIELDS or name.startswith("_") or (value is None and name not in _NULL_IS_A_VALUE):
            continue
        if isinstance(value, Mapping):
            yield from _fields(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value
