"""Errors name the tensors that do not fit transformers; the logs of transformers are off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from rl_models import Actor, Critic

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("lost", "added", "config", "message"),
    [
        (NORM, {}, {}, rf"lacks {NORM} \(1 tensors\)"),
        (None, {"odd": NORM}, {}, r"has unexpected odd \(1 tensors\)"),
        (
            None,
            {},
            {"intermediate_size": 20},
            rf"has the wrong shape for {DOWN}: \(16, 24\) where the model has \(16, 20\), .* \(3 tensors\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_named(
    tmp_path: Path, lost: str | None, added: dict[str, str], config: dict[str, int], message: str
) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    weights, settings = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(weights)
    tensors |= {name: tensors[source].clone() for name, source in added.items()}
    if lost is not None:
        del tensors[lost]
    save_file(tensors, weights, metadata={"format": "pt"})
    settings.write_text(json.dumps(json.loads(settings.read_text()) | config))
    with pytest.raises(ValueError, match=message):
        Actor.from_pretrained(tmp_path, backend="transformers", device="cpu")


def test_a_reward_model_of_several_labels_is_named(tmp_path: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"wrong shape for score.weight: \(2, 16\) where the model has \(1, 16\)"):
        Critic.from_pretrained(tmp_path, backend="transformers", device="cpu")
