"""The fields of PEFT's adapter_config.json: which values ckpt reads, and what they change."""

import math
from collections.abc import Callable, Mapping
from typing import Any

# PEFT has no dropout for adapters of parameters, so `lora_dropout` is 0 beside them, and this field has training's.
DROPOUT = "training_dropout"


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _probability(value: Any) -> bool:
    return value is None or value == 0 or (_positive(value) and value < 1)


# Fields that ckpt reads: a check of the value, and the values that are allowed.
READ: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda value: isinstance(value, int) and _positive(value), "must be a whole number of at least 1"),
    "lora_alpha": (_positive, "must be a positive number"),
    "lora_dropout": (_probability, "must be at least 0 and below 1"),
    DROPOUT: (_probability, "must be at least 0 and below 1"),
    "use_rslora": (lambda value: value is None or isinstance(value, bool), "must be true or false"),
}

# Experts share a factor, which the files repeat; PEFT does not know the field.
SHARED = "shared_experts"

# Fields that change the base model or what an adapter computes, with the values of plain LoRA; the last value is
# PEFT's.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    # Other initializations subtract the adapter from the base's weights: pissa, olora, corda, loftq, lora_ga.
    "init_lora_weights": (None, False, "gaussian", "eva", "orthogonal", "mica", True),
    "bias": (None, "none"),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "alora_invocation_tokens": ([], None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "megatron_config": ({}, None),
    **dict.fromkeys(
        ("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying", "use_bdlora"), (None, False)
    ),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config", "velora_config"), (None,)),
}

# What to do about some of them, beyond the plain value.
_FIXES = {
    "init_lora_weights": ". This initialization changes the base, which is not part of the adapter; let PEFT write a "
    "plain adapter: save_pretrained(FOLDER, path_initial_model_for_weight_conversion=FOLDER_BEFORE_TRAINING)",
    "rank_pattern": ". PEFT doubles the rank of a mixture's gate_up_proj for the target_modules gate_proj and up_proj, "
    "or 'all-linear'; give PEFT target_parameters=['experts.gate_up_proj', 'experts.down_proj'] instead",
}

# Fields that change nothing: the tensors' names say which layers are adapted, and the rest is for other values of
# `PLAIN`, for training, or a note.
NOTES = {
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
    "modules_to_save", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "megatron_core", "runtime_config", "inference_mode", "task_type", "auto_mapping", "base_model_name_or_path",
    "revision", "peft_version",
}  # fmt: skip


def require_plain_lora(config: Mapping[str, Any], file: object) -> None:
    """Refuse an adapter_config.json, whose path is `file`, unless its adapters are plain LoRA on an unchanged base."""
    for name, (is_allowed, allowed) in READ.items():
        if not is_allowed(value := config.get(name)):
            raise ValueError(f"{file}: {name}={value!r} {allowed}")
    for name, values in PLAIN.items():
        if not _equals_any(value := config.get(name), values):
            raise ValueError(
                f"{file}: {name}={value!r} is not read; use plain LoRA ({values[-1]!r}){_FIXES.get(name, '')}"
            )
    for name in config.keys() - READ.keys() - PLAIN.keys() - NOTES - {SHARED}:
        if config[name]:
            raise ValueError(
                f"{file}: {name}={config[name]!r} is not known; remove the field if it changes nothing that the "
                "adapters compute"
            )


def computation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that change what adapters compute, without those that have their plain value."""
    fields = {name: value for name, value in config.items() if name not in {*NOTES, "lora_dropout", DROPOUT}}
    return {name: value for name, value in fields.items() if value and not _equals_any(value, PLAIN.get(name, ()))}


def _equals_any(value: Any, values: tuple[Any, ...]) -> bool:
    """Say whether a value is one of `values`; 1 is not True."""
    return any(type(value) is type(allowed) and value == allowed for allowed in values)
