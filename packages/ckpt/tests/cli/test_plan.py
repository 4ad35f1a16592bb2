from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ckpt import Grid, reshard
from ckpt.cli import app

Checkpoints = Callable[..., Path]


def plan(folder: Path, *args: object) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["plan", str(folder), "--json", *map(str, args)])
    assert result.exit_code == 0, result.output
    shares: list[dict[str, Any]] = json.loads(result.stdout)
    return shares


def test_a_vision_config_alone_is_planned_without_its_tower(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("qwen2-vl")
    shutil.copy(source / "config.json", tmp_path)
    (alone,), (whole,) = plan(tmp_path), plan(source)
    assert alone["components"] == {**whole["components"], "vision": 0}
    assert whole["components"]["vision"] > 0
    assert "without its vision tower" in CliRunner().invoke(app, ["plan", str(tmp_path)]).stdout


@pytest.mark.parametrize("name", ["nemotron-h", "granite-hybrid-moe", "qwen3-next"])
def test_all_tensors_of_hybrids_have_a_component(name: str, checkpoint: Checkpoints) -> None:
    (share,) = plan(checkpoint(name))
    assert share["components"].keys() >= {"linear attention", "experts", "mlp"}
    empty = {component for component, size in share["components"].items() if not size}
    assert empty == {"vision", "mtp"}
    assert "other" not in share["components"]


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-moe"])
def test_stored_types_are_counted_whatever_the_files_call_the_tensors(
    name: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Under other prefixes, or as stacked experts; the config names another type."""
    shutil.copytree(checkpoint(name, save_original_format=False), tmp_path, dirs_exist_ok=True)
    tensors = {key: tensor.bfloat16() for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for folder in (tmp_path, tmp_path / "model.safetensors"):
        (share,) = plan(folder)
        assert share["bytes"] == sum(tensor.nbytes for tensor in tensors.values())


def test_the_shards_of_a_value_model_are_planned_as_one(checkpoint: Checkpoints, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(checkpoint("llama"), num_labels=1)
    model = transformers.AutoModelForTokenClassification.from_config(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "value")
    reshard(tmp_path / "value", tmp_path / "shards", Grid(tp=2))
    assert plan(tmp_path / "shards", "--tp", 2) == plan(tmp_path / "value", "--tp", 2)
    assert plan(tmp_path / "shards")[0]["components"]["head"] == 0
