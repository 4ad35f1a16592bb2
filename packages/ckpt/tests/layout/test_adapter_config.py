"""Which fields of PEFT's adapter_config.json are read; `tests/test_lora.py` has the fields that PEFT itself writes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ckpt.layout.adapter_config import computation, require_plain_lora

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_dropout": 0.1, "use_rslora": True, "bias": "none", "fan_in_fan_out": False, "rank_pattern": {}},
        *({"init_lora_weights": value} for value in (True, False, None, "gaussian", "eva", "orthogonal", "mica")),
        {"layers_to_transform": [0], "exclude_modules": ["lm_head"], "loftq_config": {"loftq_bits": 4}},
        {"shared_experts": True, "peft_version": "0.21.2", "qalora_group_size": 16, "of_a_later_version": None},
    ],
)
def test_plain_lora_is_read(fields: dict[str, Any]) -> None:
    require_plain_lora(PLAIN | fields, "adapter_config.json")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        *(
            ({"init_lora_weights": value}, f"init_lora_weights='{value}' is not read; use plain LoRA (True). This ini")
            for value in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "of_a_later_version")
        ),
        ({"init_lora_weights": 1}, "init_lora_weights=1 is not read"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not read; use plain LoRA ('LORA')"),
        ({"peft_type": None}, "peft_type=None is not read"),
        ({"bias": "lora_only"}, "bias='lora_only' is not read; use plain LoRA ('none')"),
        *(
            ({name: True}, f"{name}=True is not read; use plain LoRA (False)")
            for name in ("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying")
        ),
        *(
            ({name: {"a": 1}}, f"{name}={{'a': 1}} is not read; use plain LoRA")
            for name in (
                "use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config", "megatron_config",
                "rank_pattern", "alpha_pattern", "trainable_token_indices",
            )
        ),
        ({"layer_replication": [[0, 2]]}, "layer_replication=[[0, 2]] is not read"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=[1] is not read"),
        ({"of_a_later_version": True}, "of_a_later_version=True is not known; remove the field if it changes nothing"),
        ({"r": None}, "r=None must be a whole number of at least 1"),
        ({"r": True}, "r=True must be"),
        ({"r": 0}, "r=0 must be"),
        ({"lora_alpha": "16"}, "lora_alpha='16' must be a positive number"),
        ({"lora_dropout": 1.0}, "lora_dropout=1.0 must be at least 0 and below 1"),
        ({"use_rslora": "no"}, "use_rslora='no' must be true or false"),
    ],
    ids=str,
)  # fmt: skip
def test_other_adapters_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        require_plain_lora(PLAIN | fields, "adapter_config.json")


def test_fields_that_change_the_computation() -> None:
    neutral = {
        "bias": "none",
        "rank_pattern": {},
        "use_dora": False,
        "init_lora_weights": "gaussian",
        "use_rslora": None,
    }
    assert computation(PLAIN | neutral | {"lora_dropout": 0.1}) == {"r": 8, "lora_alpha": 16}
    other = {"rank_pattern": {"q_proj": 4}, "init_lora_weights": "pissa", "shared_experts": True}
    assert computation(PLAIN | other) == {"r": 8, "lora_alpha": 16, **other}
