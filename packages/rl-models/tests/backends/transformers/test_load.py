"""Errors name the tensors that do not fit transformers; the logs of transformers are off."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from rl_models import Actor, Batch, Critic

NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("lost", "added", "config", "message"),
    [
        (NORM, {}, {}, rf"lacks {NORM} \(1 tensor\); the files do not belong to its config.json"),
        (None, {"odd": NORM}, {}, r"has unexpected odd \(1 tensor\)"),
        # A model may have the value head that another model reads, `score.weight`, and no other tensor that ends so.
        (None, {"odd_score.weight": NORM}, {}, r"has unexpected odd_score.weight \(1 tensor\)"),
        (
            None,
            {},
            {"intermediate_size": 40},
            rf"has the wrong shape for {DOWN}: \(32, 48\) where the model has \(32, 40\), .* \(3 tensors\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_named(
    tiny: Callable[..., Path],
    tmp_path: Path,
    lost: str | None,
    added: dict[str, str],
    config: dict[str, int],
    message: str,
) -> None:
    shutil.copytree(tiny("llama", num_hidden_layers=1), tmp_path, dirs_exist_ok=True)
    weights, settings = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(weights)
    tensors |= {name: tensors[source].clone() for name, source in added.items()}
    if lost is not None:
        del tensors[lost]
    save_file(tensors, weights, metadata={"format": "pt"})
    settings.write_text(json.dumps(json.loads(settings.read_text()) | config))
    with pytest.raises(ValueError, match=message):
        Actor.from_pretrained(tmp_path, backend="transformers", device="cpu")


def test_weights_of_integers_are_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(tiny("llama", num_hidden_layers=1), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[NORM] = tensors[NORM].int()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{NORM} is of type torch.int32 in model.safetensors, .* save the check"):
        Actor.from_pretrained(tmp_path, backend="transformers", device="cpu")


def test_a_reward_model_of_several_rewards(tiny: Callable[..., Path]) -> None:
    folder, ids = tiny("reward", num_labels=2), torch.tensor([3, 5, 7])
    model = AutoModelForSequenceClassification.from_pretrained(folder, pad_token_id=0).eval()
    for backend in ("transformers", "parallel"):
        critic = Critic.from_pretrained(folder, backend=backend, device="cpu")
        rewards = critic.rewards(Batch.from_sequences([ids]))
        torch.testing.assert_close(rewards, model(input_ids=ids[None]).logits.detach(), rtol=0, atol=1e-5)
