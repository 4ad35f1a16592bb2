"""A resumed run has the options and the inputs that it began with, or says what has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from parallel_layers.model import LoraOptions
from rl_train.cli.commands import app
from rl_train.data.prompts import read_prompts
from rl_train.loop.folder import write_options
from rl_train.loop.resume import _BLOCK, _BLOCKS, _file, _plain, changed_inputs, check_options, inputs_of
from rl_train.options.file_options import SftOptions
from rl_train.options.names import of_earlier_runs
from rl_train.options.options import TrainOptions


def test_options_that_may_change() -> None:
    options = TrainOptions(model=Path("m"), prompts=Path("p"), reward="r:f")
    check_options(options.model_copy(update={"steps": 500, "dims": "tp=2", "device": "cpu"}), options.to_json())
    with pytest.raises(ValueError, match=r"run holds a run with seed=0, this one has 1; choose another out"):
        check_options(options.model_copy(update={"seed": 1}), options.to_json())


def test_a_run_from_before_options_were_nested_goes_on() -> None:
    file = Path(__file__).parents[1] / "options" / "earlier_run.json"
    earlier = json.loads(file.read_text())
    options = TrainOptions(**of_earlier_runs(earlier, TrainOptions.names()))
    assert options.lora == LoraOptions(8, 4.0, ["q_proj", "v_proj"])
    assert (options.optimizer.betas, options.engine.recompute, options.stops) == ((0.9, 0.95), (0, 1), (2, 7))
    check_options(options, earlier)
    for name, value in (("optimizer.learning_rate", 1.0), ("engine.lora.rank", 4), ("evaluation.samples", 3)):
        changed = TrainOptions(**of_earlier_runs(earlier, TrainOptions.names()) | {name: value})
        if name.startswith("evaluation"):
            check_options(changed, earlier)
        else:
            with pytest.raises(ValueError, match=f"holds a run with {name}="):
                check_options(changed, earlier)
    without = {name: value for name, value in earlier.items() if not name.startswith("lora")} | {"lora_rank": 0}
    with pytest.raises(ValueError, match=r"holds a run with engine.lora.rank=None, this one has 8"):
        check_options(options, without)


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [("mini_batch", 9, 4), ("objective.lam", 0.5, 0.25), ("max_batches", 3, 4), ("data.weights", "2", "3,1")],
)
def test_a_run_with_an_option_without_effect_goes_on_without_it(name: str, value: Any, other: Any) -> None:
    """Such options are refused by now, so that nobody can give them again."""
    of_run = {"model": Path("m"), "prompts": Path("p"), "reward": "r:f", "prompts_per_step": 4, "samples": 2}
    earlier = TrainOptions(**of_run, **{name: value}).to_json() | {"command": "train", "inputs": {}}
    check_options(TrainOptions(**of_run), earlier)
    check_options(TrainOptions(**of_run, **{name: value}), earlier)
    for changed in ({name: other}, {"seed": 1}):
        with pytest.raises(ValueError, match=f"holds a run with {next(iter(changed))}="):
            check_options(TrainOptions(**of_run, **changed), earlier)


def replace(name: str, old: str, new: str) -> Callable[[], Any]:
    return lambda: Path(name).write_text(Path(name).read_text().replace(old, new))


def flip(name: str) -> None:
    """Change the last byte of a file."""
    data = bytearray(Path(name).read_bytes())
    data[-1] ^= 1
    Path(name).write_bytes(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            replace("prompts.jsonl", "a", "ab"),
            "prompts=prompts.jsonl had 2 rows, digest .{8}, and now has 2 rows, dige",
        ),
        (replace("prompts.jsonl", '"answer": 1', '"answer": 2'), "prompts=prompts.jsonl had 2 rows, digest"),
        (
            lambda: Path("eval.jsonl").write_text('{"text": "c"}\n' * 3),
            "evaluation.prompts=eval.jsonl had 1 rows.* has 3 rows",
        ),
        (lambda: flip("model/model.safetensors"), "model=model had . files, digest .{8}, and now has . files, digest"),
        (lambda: Path("model/chat_template.jinja").touch(), "model=model had 5 files, .* now has 6 files"),
        (replace("judge_of_resume.py", "1", "2"), "reward=judge_of_resume:f had 1 files"),
    ],
)
def test_changed_inputs_are_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[], Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(model, "model")
    Path("prompts.jsonl").write_text('{"text": "a", "answer": 1}\n{"text": "b"}\n')
    Path("eval.jsonl").write_text('{"text": "c"}\n')
    Path("judge_of_resume.py").write_text("f = lambda prompt, response, row: 1")
    names: dict[str, Any] = {"model": Path("model"), "prompts": Path("prompts.jsonl"), "out": Path("run")}
    options = TrainOptions(**names, eval_prompts=Path("eval.jsonl"), reward="judge_of_resume:f")

    def inputs() -> Any:
        files = {"prompts": options.prompts, "evaluation.prompts": Path("eval.jsonl")}
        return inputs_of(options, {name: read_prompts(file, options.model, 9) for name, file in files.items()})

    write_options(options, inputs())
    change()
    assert changed_inputs(options, inputs()) == []  # a run without a training checkpoint begins anew
    latest = Path("run/training/actor/latest")
    latest.parent.mkdir(parents=True)
    latest.touch()
    with pytest.raises(ValueError, match=f"run holds a run with other inputs: {said}.*or go on with --accept-changes"):
        changed_inputs(options, inputs())
    (change,) = changed_inputs(options.model_copy(update={"accept_changes": True}), inputs())
    write_options(options, inputs())
    assert changed_inputs(options, inputs()) == []
    # An option that names something else may change, or check_options refuses it.
    other = TrainOptions(**names, eval_prompts=Path("other"), reward="judge_of_resume:f")
    assert changed_inputs(other, inputs()) == []


@pytest.mark.parametrize("base", ["memory://rows", None])
@pytest.mark.parametrize("inside", ["*/rows.jsonl", ""])
def test_files_of_patterns_and_folders_that_are_not_read_count(
    base: str | None, inside: str, tmp_path: Path, upload: Callable[[Path, str], None]
) -> None:
    def digest() -> dict[str, Any]:
        upload(tmp_path, "memory://rows")
        return inputs_of(
            SftOptions(model=tmp_path, dataset=tmp_path), {"dataset": [Path(f"{base or tmp_path}/{inside}")]}
        )["dataset"]

    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text('{"text": "a"}\n')
    before = digest()
    (tmp_path / "b" / "rows.jsonl").write_text('{"text": "aa"}\n')
    assert before["files"] >= 2
    assert digest() != before


def test_of_a_large_file_blocks_from_its_begin_to_its_end_are_read(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    for size in (0, 5, _BLOCKS * _BLOCK, _BLOCKS * _BLOCK + 7, 40 * _BLOCK + 1):
        file.write_bytes(bytes(size - 1) + b"e" if size else b"")
        read = _file(file)
        assert len(read) - len(f"weights {size}") == min(size, _BLOCKS * _BLOCK)
        assert read.endswith(b"e") == bool(size)


def test_values_that_json_has_not_have_the_same_text_in_each_run() -> None:
    assert _plain({"b", "a"}) == "['a', 'b']"
    assert _plain(b"a") == _plain(memoryview(b"a")) != _plain(b"b")
    assert _plain(object()) == "<object object>"


@pytest.mark.usefixtures("folder_of_rewards")
def test_a_run_goes_on_with_other_rows_only_when_told_to(model: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "run"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    known = {"model": model, "prompts": file, "out": out, "reward": "rewards:alphabet", "device": "cpu"}
    known |= {"prompts-per-step": 2, "samples": 2, "max-new-tokens": 2, "save-every": 1, "show-every": 0}
    command = ["train", *(f"--{name}={value}" for name, value in known.items())]
    assert CliRunner().invoke(app, [*command, "--steps=1"]).exit_code == 0
    file.write_text('{"text": "a"}\n{"text": "c"}\n')
    for more in ([], ["--dry-run"]):
        result = CliRunner().invoke(app, [*command, "--steps=2", *more])
        assert result.exit_code == 2
        assert "holds a run with other inputs: prompts=" in result.output
    result = CliRunner().invoke(app, [*command, "--steps=2", "--accept-changes"])
    assert result.exit_code == 0, result.output
    assert f"going on with other inputs: prompts={file} had 2 rows" in " ".join(result.output.split())
    assert CliRunner().invoke(app, [*command, "--steps=2"]).exit_code == 0
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2]
