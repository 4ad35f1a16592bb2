from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from typer.testing import CliRunner

from ckpt import Grid, layout_for, load_hf, reshard, save_hf, save_training
from ckpt.cli import app

Checkpoints = Callable[..., Path]


def test_inspect_shows_a_table(checkpoint: Checkpoints) -> None:
    result = CliRunner().invoke(app, ["inspect", str(checkpoint("llama"))])
    assert result.exit_code == 0
    assert "llama" in result.stdout
    assert "F32" in result.stdout


def test_inspect_prints_json(checkpoint: Checkpoints) -> None:
    result = CliRunner().invoke(app, ["inspect", str(checkpoint("qwen2-tied")), "--json"])
    facts = json.loads(result.stdout)
    assert facts["family"] == "qwen2"
    assert facts["role"] == "causal_lm"
    assert facts["tied"] is True
    assert facts["parameters"] * 4 == facts["bytes"] == 4 * sum(facts["dtypes"].values())
    assert facts["layers"] == 2


def test_inspect_recognises_a_value_model(checkpoint: Checkpoints, tmp_path: Path) -> None:
    layout = layout_for(checkpoint("llama"), role="value")
    save_hf(tmp_path / "v", {**load_hf(checkpoint("llama"), layout), "score.weight": torch.ones(1, 32)}, layout)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "v"), "--json"])
    assert json.loads(result.stdout)["role"] == "value"


def test_inspect_recognises_both_heads(checkpoint: Checkpoints, tmp_path: Path) -> None:
    layout = layout_for(checkpoint("llama"), role="causal_lm_with_value")
    save_hf(tmp_path / "v", {**load_hf(checkpoint("llama"), layout), "score.weight": torch.ones(1, 32)}, layout)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "v"), "--json"])
    assert json.loads(result.stdout)["role"] == "causal_lm_with_value"


def test_inspect_describes_a_sharded_folder(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source, shards = checkpoint("qwen2"), tmp_path / "shards"
    reshard(source, shards, Grid(tp=4, pp=2), target="megatron")
    whole, parts = (
        json.loads(CliRunner().invoke(app, ["inspect", str(folder), "--json"]).stdout) for folder in (source, shards)
    )
    # Four ranks share two key-value heads, and every rank has the norms: parameters are counted once.
    for fact in ("family", "role", "parameters", "dtypes", "layers", "tied"):
        assert parts[fact] == whole[fact]
    assert (parts["grid"]["tp"], parts["target"]) == (4, "megatron")
    assert parts["files"] == 8
    assert parts["bytes"] > whole["bytes"]
    shown = CliRunner().invoke(app, ["inspect", str(shards)])
    assert shown.exit_code == 0
    assert "tp=4 pp=2" in shown.stdout


def test_inspect_describes_and_checks_a_training_run(checkpoint: Checkpoints, tmp_path: Path) -> None:
    layout = layout_for(checkpoint("qwen2"), role="value")
    tensors = {**load_hf(checkpoint("qwen2"), layout), "score.weight": torch.ones(1, 32)}
    moments = {name: {"exp_avg": torch.zeros_like(tensor)} for name, tensor in tensors.items()}
    for step in (1, 2):
        save_training(tmp_path, step, tensors, layout, optimizer=moments)

    def inspect(folder: Path, *options: str) -> dict[str, object]:
        facts: dict[str, object] = json.loads(
            CliRunner().invoke(app, ["inspect", str(folder), "--json", *options]).stdout
        )
        return facts

    facts = inspect(tmp_path, "--check")
    elements = sum(tensor.numel() for tensor in tensors.values())
    assert (facts["family"], facts["role"], facts["layers"], facts["step"]) == ("qwen2", "value", layout.num_layers, 2)
    assert (facts["parameters"], facts["bytes"], facts["optimizer"]) == (elements, 8 * elements, ["exp_avg"])
    assert inspect(tmp_path / "step-00000001")["step"] == 1
    assert "exp_avg" in CliRunner().invoke(app, ["inspect", str(tmp_path)]).stdout
    file = tmp_path / "step-00000002" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    damaged = CliRunner().invoke(app, ["inspect", str(tmp_path), "--check"])
    assert damaged.exit_code == 2
    assert "is damaged" in damaged.stderr


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "does not exist" in result.stderr
    assert result.stderr.count("\n") == 1
