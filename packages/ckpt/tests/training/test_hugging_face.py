"""A step of a training run becomes the Hugging Face checkpoint that was saved from its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ckpt import AdapterLayout, Checkpoint, Place, layout_for, load_hf, save_training
from ckpt.cli import app
from ckpt.training import training_to_hf

Checkpoints = Callable[..., Path]


@pytest.mark.parametrize(
    "name",
    ["llama-tied", pytest.param("qwen3-moe", marks=pytest.mark.slow), pytest.param("deepseek", marks=pytest.mark.slow)],
)
def test_a_step_is_written_with_the_files_of_its_model(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint(name)
    layout = layout_for(source)
    for step, factor in ((3, 1.0), (12, 2.0)):
        weights = {key: weight * factor for key, weight in load_hf(source, layout).items()}
        moments = {key: {"step": torch.tensor(3.0), "exp_avg": weight.clone()} for key, weight in weights.items()}
        save_training(tmp_path / "run", step, weights, layout, optimizer=moments)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokenizer.json").write_text("{}")
    command = ["convert", tmp_path / "run", tmp_path / "newest", "--copy-from", tmp_path / "tokens"]
    result = CliRunner().invoke(app, [*map(str, command)])
    assert result.exit_code == 0, result.output
    training_to_hf(tmp_path / "run" / "step-00000003", tmp_path / "third", dtype=torch.bfloat16)
    expected = load_file(Checkpoint(source).path / "model.safetensors")
    newest, third = (load_file(tmp_path / folder / "model.safetensors") for folder in ("newest", "third"))
    assert newest.keys() == third.keys() == expected.keys()
    for key, weight in expected.items():
        assert torch.equal(newest[key], weight * 2)
        assert torch.equal(third[key], weight.to(third[key].dtype))
    assert third["model.norm.weight"].dtype == torch.bfloat16
    assert (tmp_path / "newest" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ({0: (0, 40)}, "covered 0 times"),
        ({0: (0, 16), 24: (24, 50)}, "covered 0 times"),
        ({0: (0, 50), 8: (8, 50)}, "covered 2 times"),
        ({8: (0, 50)}, "reaches outside"),
    ],
)
def test_boxes_that_do_not_cover_a_weight_once_are_refused(
    rows: dict[int, tuple[int, int]], problem: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    layout = layout_for(source)
    save_training(tmp_path / "run", 1, load_hf(source, layout), layout)
    stored = load_file(file := tmp_path / "run" / "step-00000001" / "rank-00000.safetensors")
    embedding = stored.pop("model/model.embed_tokens.weight@0,0")
    stored |= {f"model/model.embed_tokens.weight@{at},0": embedding[a:b].clone() for at, (a, b) in rows.items()}
    save_file(stored, file)
    for command in (["inspect"], ["convert", tmp_path / "out"], ["convert", tmp_path / "out", "--to", "megatron"]):
        result = CliRunner().invoke(app, [command[0], str(tmp_path / "run"), *map(str, command[1:])])
        assert result.exit_code == 2
        assert "does not hold each element of model/model.embed_tokens.weight" in result.output
        assert problem in result.output
    assert not (tmp_path / "out").exists()


def test_what_a_run_cannot_be_is_refused(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("llama")
    layout = layout_for(source)
    save_training(tmp_path / "run", 1, load_hf(source, layout), layout, optimizer={})
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "fp8"])
    assert result.exit_code == 2
    assert "--to hf takes no --format with this source; leave it out" in result.output
    adapters = AdapterLayout(layout, ["model.layers.0.self_attn.q_proj"], 2, {"lora_alpha": 4})
    tensors = {name: torch.ones(block.shape) for name, block in adapters.at(Place()).items()}
    save_training(tmp_path / "adapters", 1, tensors, adapters)
    with pytest.raises(ValueError, match=r"step-00000001 holds adapters, .*; `rl-train export` merges them"):
        training_to_hf(tmp_path / "adapters", tmp_path / "out")
    monkeypatch.chdir(tmp_path / "run" / "step-00000001")
    training_to_hf(".", tmp_path / "out")
