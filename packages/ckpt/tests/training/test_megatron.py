"""A training run goes to Megatron-Core's format and back; Megatron-Core itself reads it in the root's tests."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from typer.testing import CliRunner

from ckpt import Grid, Layout, Place, layout_for, load_hf, load_training, save_training, to_megatron
from ckpt.cli import app
from ckpt.files import Lock
from ckpt.files.torch_dist import read_index
from ckpt.layout.megatron_names import stored_blocks
from ckpt.training import latest_step, megatron_to_training, training_to_megatron

Checkpoints = Callable[..., Path]


def adamw(weights: dict[str, Tensor], step: float = 3.0, *, master: bool = False) -> dict[str, dict[str, Tensor]]:
    """The state of AdamW."""
    state = {}
    for name, weight in weights.items():
        moments = {"exp_avg": torch.randn(weight.shape), "exp_avg_sq": torch.rand(weight.shape)}
        state[name] = {"step": torch.tensor(step), **moments}
        if master and weight.dtype != torch.float32:
            state[name]["master"] = weight.float() * 1.0001
    return state


def saved_run(source: Path, folder: Path, **changes: Any) -> Layout:
    """Save a training run; return its layout."""
    layout = layout_for(source)
    weights = load_hf(source, layout, dtype=changes.get("dtype"))
    optimizer = changes.get("optimizer", adamw(weights, master=changes.get("dtype") is not None))
    save_training(folder, 12, weights, layout, optimizer=optimizer)
    return layout


QUICK = {("qwen3-moe", "bf16"), ("llama-tied", "fp32")}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{kind}", marks=() if (name, kind) in QUICK else pytest.mark.slow)
        for name in ("llama-tied", "qwen3-moe", "deepseek")
        for kind, dtype in (("fp32", None), ("bf16", torch.bfloat16))
    ],
)
def test_there_and_back(name: str, dtype: torch.dtype | None, checkpoint: Checkpoints, tmp_path: Path) -> None:
    layout = saved_run(checkpoint(name), tmp_path / "training", dtype=dtype)
    ep = 2 if layout.num_experts else 1
    dims = f"tp=2,pp=2,ep={ep}"
    for command in (
        ("convert", tmp_path / "training", tmp_path / "run", "--to", "megatron", "--dims", dims),
        ("convert", tmp_path / "run", tmp_path / "back", "--to", "training"),
    ):
        result = CliRunner().invoke(app, [*map(str, command)])
        assert result.exit_code == 0, result.output
    folder = tmp_path / "run" / "iter_0000003"
    assert len(list(folder.glob("*.distcp"))) == 4 * ep
    index = read_index(folder)
    norm = "decoder.final_layernorm.weight"
    assert index[norm].dtype == (dtype or torch.float32)
    states = [f"optimizer.state.{slot}.{norm}" for slot in ("param", "exp_avg", "exp_avg_sq")]
    assert {index[state].dtype for state in states} == {torch.float32}
    stored = {state: torch.zeros(index[state].shape) for state in states}
    dcp.load(stored, checkpoint_id=folder, no_dist=True)
    whole = load_training(tmp_path / "training", layout)
    weight, slots = whole.tensors["model.norm.weight"].float(), whole.optimizer["model.norm.weight"]
    expected = {"param": slots.get("master", weight), "exp_avg": slots["exp_avg"], "exp_avg_sq": slots["exp_avg_sq"]}
    same({state.split(".")[2]: value for state, value in stored.items()}, expected)
    for place in Grid(tp=2).places():
        before, after = (load_training(tmp_path / run, layout, place, check=True) for run in ("training", "back"))
        assert (after.step, after.extra["steps"]) == (3, 3)
        same(before.tensors, after.tensors)
        assert before.optimizer.keys() == after.optimizer.keys()
        for tensor, slots in before.optimizer.items():
            same(slots, after.optimizer[tensor])


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert not [name for name, value in first.items() if not torch.equal(value, second[name])]


def test_what_has_no_form_in_megatron_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("llama")
    weights = load_hf(source, layout_for(source))
    cases: dict[str, tuple[dict[str, dict[str, Tensor]], str]] = {
        "none": ({}, r"has the optimizer state \[\], and Megatron-Core's AdamW"),
        "muon": (
            {name: {"momentum_buffer": torch.zeros_like(weight)} for name, weight in weights.items()},
            r"has the optimizer state \['momentum_buffer'\]",
        ),
        "muon beside AdamW": (
            {**adamw(weights), "model.layers.0.mlp.down_proj.weight": {"momentum_buffer": torch.zeros(32, 48)}},
            r"has the optimizer state \['exp_avg', 'exp_avg_sq', 'momentum_buffer', 'step'\]",
        ),
        "steps": (
            {**adamw(weights), "model.norm.weight": adamw(weights, 5.0)["model.norm.weight"]},
            r"has weights of \[3, 5\] steps, and Megatron-Core has one count",
        ),
    }
    for case, (optimizer, message) in cases.items():
        saved_run(source, tmp_path / case, optimizer=optimizer)
        with pytest.raises(ValueError, match=message):
            training_to_megatron(tmp_path / case, tmp_path / "run")
    lacking = adamw(weights)
    del lacking["model.norm.weight"]["exp_avg_sq"]
    saved_run(source, tmp_path / "lacking", optimizer=lacking)
    with pytest.raises(ValueError, match=r"final_layernorm.weight joins tensors with and without AdamW state"):
        training_to_megatron(tmp_path / "lacking", tmp_path / "run")
    # A frozen weight has no state there, either.
    frozen = adamw(weights)
    del frozen["model.norm.weight"]
    saved_run(source, tmp_path / "frozen", optimizer=frozen)
    training_to_megatron(tmp_path / "frozen", tmp_path / "run")
    assert "optimizer.state.exp_avg.decoder.final_layernorm.weight" not in read_index(tmp_path / "run" / "iter_0000003")
    # A run with numbered steps is never replaced: Megatron may have trained it.
    with pytest.raises(ValueError, match=r"run holds more than a checkpoint, \['iter_0000003/"):
        training_to_megatron(tmp_path / "frozen", tmp_path / "run")


def test_what_has_no_optimizer_state_by_weights_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    saved_run(checkpoint("llama"), tmp_path / "training")
    training_to_megatron(tmp_path / "training", tmp_path / "run", target="megatron")
    megatron_to_training(tmp_path / "run", tmp_path / "back")
    with pytest.raises(ValueError, match=r"step-00000003 exists; choose another folder"):
        megatron_to_training(tmp_path / "run", tmp_path / "back")
    (tmp_path / "back" / "step-00000003").rename(tmp_path / "back" / "step-00000004")
    (tmp_path / "back" / "latest").write_text("step-00000004")
    with pytest.raises(ValueError, match=r"back is at step 4, and .*iter_0000003 is step 3; choose another folder"):
        megatron_to_training(tmp_path / "run", tmp_path / "back")
    (tmp_path / "run" / "iter_0000003").rename(tmp_path / "run" / "release")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(ValueError, match="with optimizer state; pass one"):
        megatron_to_training(tmp_path / "run", tmp_path / "other")
    with pytest.raises(ValueError, match="is no run or step"):
        megatron_to_training(checkpoint("llama"), tmp_path / "other")
    with pytest.raises(ValueError, match="nowhere is no folder; pass a run or a step"):
        megatron_to_training(tmp_path / "nowhere", tmp_path / "other")
    to_megatron(checkpoint("llama"), tmp_path / "weights")
    (tmp_path / "weights" / "release").rename(tmp_path / "weights" / "iter_0000003")
    (tmp_path / "weights" / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(ValueError, match="no optimizer state by weights: the form is bound to a grid"):
        megatron_to_training(tmp_path / "weights", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_run_to_which_another_process_saves_is_refused(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where two conversions of different steps meet: the older one would set `latest` back."""
    monkeypatch.chdir(tmp_path)
    saved_run(checkpoint("llama"), tmp_path / "training")
    training_to_megatron(tmp_path / "training", tmp_path / "run")
    (tmp_path / "back").mkdir()
    error = r"process \d+ of .* saves a training checkpoint to .*back; wait until it ends"
    with Lock(tmp_path / "back" / "latest", f"saves a training checkpoint to {tmp_path / 'back'}"):
        with pytest.raises(ValueError, match=error):
            megatron_to_training(tmp_path / "run", tmp_path / "back")
        assert not (tmp_path / "back" / "step-00000003").exists()
    met: list[str] = []

    def meet(done: int, total: int) -> None:
        if not met:
            with pytest.raises(ValueError, match=error) as refused:
                megatron_to_training(tmp_path / "run", tmp_path / "back")
            met.append(str(refused.value))

    megatron_to_training(tmp_path / "run", tmp_path / "back", progress=meet)
    assert len(met) == 1
    assert latest_step(tmp_path / "back") == 3
    with pytest.raises(ValueError, match=r"memory://back/step-00000003 is a URL; save into a folder of this machine"):
        megatron_to_training(tmp_path / "run", "memory://back")
    assert not Path("memory:").exists()


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "__0_0.distcp"])
def test_a_missing_file_of_a_step_is_named(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    saved_run(checkpoint("llama"), tmp_path / "training")
    training_to_megatron(tmp_path / "training", tmp_path / "run")
    step = tmp_path / "run" / "iter_0000003"
    (step / name).unlink()
    for to in ("training", "hf", "megatron"):
        for source in (tmp_path / "run", step):
            result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), "--to", to])
            assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
            assert name in result.stderr
            assert "copy the missing file" in result.stderr or "is not complete; pass the step's" in result.stderr
            assert not (tmp_path / "out").exists()


def test_the_command_reports_the_step_that_it_adds_to_a_run(checkpoint: Checkpoints, tmp_path: Path) -> None:
    saved_run(checkpoint("llama"), tmp_path / "training")
    training_to_megatron(tmp_path / "training", tmp_path / "run")
    source = checkpoint("llama")
    weights, layout = load_hf(source, layout_for(source)), layout_for(source)
    save_training(tmp_path / "earlier", 1, weights, layout, optimizer=adamw(weights))
    command = ["convert", str(tmp_path / "run"), str(tmp_path / "earlier"), "--to", "training", "--json"]
    report = json.loads(CliRunner().invoke(app, command).stdout)
    step = tmp_path / "earlier" / "step-00000003"
    (file,) = step.glob("*.safetensors")
    assert report == {"folder": str(step), "files": 1, "bytes": file.stat().st_size}


def test_inspect_shows_a_run_of_a_vision_model(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("qwen3-vl")
    layout = layout_for(source)
    weights = load_hf(source, layout, Place())
    save_training(tmp_path / "training", 1, weights, layout, optimizer=adamw(weights))
    training_to_megatron(tmp_path / "training", tmp_path / "run")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "training"), "--json"])
    assert json.loads(result.stdout)["optimizer"] == ["exp_avg", "exp_avg_sq", "step"]
    megatron_to_training(tmp_path / "run", tmp_path / "back")
    before, after = (load_training(tmp_path / run, layout) for run in ("training", "back"))
    same(before.tensors, after.tensors)


def test_no_weight_and_no_state_is_left_out_silently(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = saved_run(checkpoint("llama"), tmp_path / "training")
    with monkeypatch.context() as patched:
        # A layout for Megatron-Core without one of the tensors stands for weights that it does not describe.
        patched.setattr(
            "ckpt.training.megatron.stored_blocks",
            lambda *a, **k: {n: b for n, b in stored_blocks(*a, **k).items() if n != "output_layer.weight"},
        )
        with pytest.raises(ValueError, match=r"1 weights that Megatron-Core has no tensor for: \['lm_head.weight'\]"):
            training_to_megatron(tmp_path / "training", tmp_path / "run")
    training_to_megatron(tmp_path / "training", tmp_path / "run")
    assert layout.num_layers == 2
    folder = tmp_path / "run" / "iter_0000003"
    index = pickle.loads((folder / ".metadata").read_bytes())
    norm = "optimizer.state.exp_avg_sq.decoder.final_layernorm.weight"
    entry = index.state_dict_metadata.pop(norm)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=r"of decoder.final_layernorm.weight the state \['exp_avg', 'master'\] alone"):
        megatron_to_training(tmp_path / "run", tmp_path / "back")
    index.state_dict_metadata |= {norm: entry, "optimizer.bucket.0": entry}
    (place,) = (place for at, place in index.storage_data.items() if at.fqn == norm)
    index.storage_data[MetadataIndex("optimizer.bucket.0", (0,))] = place
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=r"holds optimizer state of no weight, \['optimizer.bucket.0'\]"):
        megatron_to_training(tmp_path / "run", tmp_path / "back")
    # The flat state of a rank, as of an optimizer whose state is bound to a grid.
    index.state_dict_metadata[norm] = dataclasses.replace(entry, size=torch.Size([16]))
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(
        ValueError, match=rf"{norm} has shape \(16,\): the form is bound to a grid; load it in Megatron"
    ):
        megatron_to_training(tmp_path / "run", tmp_path / "back")
    assert not (tmp_path / "back").exists()
