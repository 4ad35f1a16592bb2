"""`rl-train export`: training checkpoints become the checkpoints that their runs write at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from ckpt import Checkpoint, layout_for, load_hf, merge, save_training
from rl_models import Actor, OptimizerOptions
from rl_models.api import WholeBatches
from rl_train.cli.commands import app
from rl_train.loop.checked_examples import check_examples
from rl_train.loop.export import export, open_step
from rl_train.loop.file_objectives import OBJECTIVES
from rl_train.loop.file_recipe import FileRecipe
from rl_train.loop.folder import write_options
from rl_train.loop.loop import Loop
from rl_train.options.file_options import DpoOptions, FileOptions, RewardModelOptions
from rl_train.options.options import TrainOptions

ROWS = [{"prompt": letter, "chosen": "bcd", "rejected": "dcb"} for letter in "abcd"]


def trained(kind: type[FileOptions], model: Path, out: Path, **options: Any) -> None:
    """Train two steps in this process, each with a training checkpoint."""
    given: dict[str, Any] = {"steps": 2, "save_every": 1, "batch_size": 2, "device": "cpu", "learning_rate": 0.01}
    resolved = kind(model=model, dataset=out / "rows.jsonl", out=out, **given | options)
    checked, lora = check_examples(resolved, ROWS), resolved.lora
    write_options(resolved)
    worker = OBJECTIVES[resolved.learned].kind.from_pretrained(
        model, device="cpu", lora=lora, optimizer=OptimizerOptions(learning_rate=0.01)
    )
    beside = None if lora else WholeBatches(Actor.from_pretrained(model, device="cpu"))
    recipe = FileRecipe(lambda make: make(), lambda event: None, True, checked, WholeBatches(worker), beside)
    Loop(resolved, resolved, recipe).run()


@pytest.mark.parametrize(
    ("kind", "options"), [(DpoOptions, {}), (DpoOptions, {"lora_rank": 2}), (RewardModelOptions, {})]
)
def test_the_last_step_is_the_result_of_the_run(
    kind: type[FileOptions],
    options: dict[str, Any],
    model: Path,
    tmp_path: Path,
    upload: Callable[[Path, str], None],
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    trained(kind, model, run, **options)
    name = "critic" if kind is RewardModelOptions else "actor"
    result = CliRunner().invoke(app, ["export", str(run), str(out)])
    assert result.exit_code == 0, result.output
    assert f"wrote step 2 of {run / 'training' / name} to {out}" in result.output.replace("\n", "")
    weights, expected = (load_file(folder / "model.safetensors") for folder in (out, run / name))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], weight) for key, weight in expected.items())
    assert {file.name for file in out.iterdir()} == {file.name for file in (run / name).iterdir()}
    first = CliRunner().invoke(app, ["export", str(run / "training" / "step-00000001"), str(tmp_path / "first")])
    assert first.exit_code == 0, first.output
    others = load_file(tmp_path / "first" / "model.safetensors")
    assert any(not torch.equal(others[key], weight) for key, weight in expected.items())
    upload(run, "memory://bucket/run")
    for inside, step in ((f"training/{name}", 2), ("training/step-00000001", 1)):
        copy = tmp_path / f"of {step}"
        result = CliRunner().invoke(app, ["export", f"memory://bucket/run/{inside}", str(copy)])
        assert f"wrote step {step} of memory://bucket/run/training/{name}" in result.output.replace("\n", "")
        assert (copy / "model.safetensors").read_bytes() == (
            (out if step == 2 else tmp_path / "first") / "model.safetensors"
        ).read_bytes()
    missing = CliRunner().invoke(app, ["export", str(run / "training" / name / "step-00000009"), str(out)])
    assert missing.exit_code == 2
    assert "has no checkpoint step-00000009; its steps are [1, 2]" in missing.output
    over = CliRunner().invoke(app, ["export", str(run), str(model)])
    assert over.exit_code == 2
    assert "is the model that the run began with; choose another folder" in " ".join(over.output.split())


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.bfloat16), ("float32", torch.float32)])
def test_the_result_has_the_dtype_of_the_model(
    dtype: str | None, expected: torch.dtype, model: Path, tmp_path: Path
) -> None:
    """Some CPUs train a model of bfloat16 in float32."""
    merge(model, tmp_path / "model", dtype=torch.bfloat16)
    options = DpoOptions(model=tmp_path / "model", dataset=Path("rows.jsonl"), out=tmp_path / "run", dtype=dtype)
    write_options(options)
    layout = layout_for(model)
    save_training(options.out / "training" / "actor", 1, load_hf(model, layout), layout)
    export(options.out, tmp_path / "out", lambda done, total: None)
    assert Checkpoint.open(tmp_path / "out").dtype == expected


def test_the_options_of_a_run_are_read_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TrainOptions(
        model=model,
        prompts=tmp_path / "p",
        reward="r:f",
        out=tmp_path / "run",
        algorithm="ppo",
        dtype="bfloat16",
        stop_ids="2,7",
        logger="tensorboard",
        **{"engine.lora.rank": 4, "engine.lora.targets": "q_proj,v_proj", "optimizer.betas": "0.9,0.95"},
    )
    write_options(options)
    for model_name in ("actor", "critic"):
        step = tmp_path / "run" / "training" / model_name / "step-00000003"
        step.mkdir(parents=True)
        (step / "state.json").write_text(json.dumps({}))
        (step.parent / "latest").write_text("step-00000003\n")
    for inside, expected in (("", "actor"), ("training", "actor"), ("training/step-00000003", "actor"),
                             ("training/critic", "critic"), ("training/critic/step-00000003", "critic")):  # fmt: skip
        with open_step(tmp_path / "run" / inside) as saved:
            assert saved.folder == tmp_path / "run" / "training" / expected
    with open_step(tmp_path / "run" / "training" / "critic") as saved:
        assert (saved.options, saved.step) == (options, 3)
    monkeypatch.chdir(tmp_path / "run")  # whose options.json is beside no URL
    for elsewhere in (tmp_path / "elsewhere", Path("memory://elsewhere")):
        with (
            pytest.raises(ValueError, match=r"is in no run, a folder with options\.json; give the --out of a run"),
            open_step(elsewhere),
        ):
            pass
