"""`train_on`: one call with rows from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_models import Actor
from rl_train.data.mixture import by_source
from rl_train.loop import train_on
from rl_train.loop.checked_examples import check_examples
from rl_train.loop.checked_run import check_run
from rl_train.quickstart import task

SMALL: dict[str, Any] = {"device": "cpu", "steps": 1}


def test_supervised_then_reinforced(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "bc"}, {"prompt": "b", "completion": "cd"}]
    events: list[Any] = []
    of_rows: dict[str, Any] = {"recipe": "sft", "eval_dataset": iter(rows), "batch_size": 2, "learning_rate": 0.01}
    values = train_on(model, iter(rows), on_event=events.append, out=tmp_path / "sft", **of_rows, **SMALL)
    assert values["eval/loss"] < next(event["eval/loss"] for event in events if "eval/loss" in event)
    drawn: dict[str, Any] = {"algorithm": "reinforce++", "prompts_per_step": 2, "max_new_tokens": 2}
    prompts = [{"text": letter} for letter in "ab"]
    result = train_on(tmp_path / "sft" / "actor", prompts, reward=task.reward, out=tmp_path / "rl", **drawn, **SMALL)
    assert result["responses"] == 2
    Actor.from_pretrained(tmp_path / "rl" / "actor", device="cpu")
    options = json.loads((tmp_path / "rl" / "options.json").read_text())
    assert options["reward"] == "rl_train.quickstart.task:reward"


@pytest.mark.parametrize("recipe", ["train", "sft"])
@pytest.mark.parametrize("weights", ["", "3,1"])
def test_named_rows_are_mixed_as_files_are(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, weights: str
) -> None:
    """The rows of a run, in its order, and the names of its metrics are those of the same rows in files."""
    kept: list[Any] = []
    for of in ("file_recipe.train", "run.train"):
        monkeypatch.setattr(f"rl_train.loop.{of}", lambda checked, on_event: kept.append(checked) or {})
    rows = {
        name: [{"text": letter * 2} for letter in letters] for name, letters in (("math", "abcde"), ("code", "fgh"))
    }
    options: dict[str, Any] = {"recipe": recipe, "data": {"weights": weights} if weights else {}, "steps": 4}
    if recipe == "train":
        options |= {"reward": task.reward, "prompts_per_step": 2}
        options["data"] = options["data"] | {"curriculum": 0.5}
    else:
        options["batch_size"] = 2
    files = [tmp_path / f"{name}.jsonl" for name in rows]
    for file, of_file in zip(files, rows.values(), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in of_file))
    train_on(model, rows, eval_dataset={"code": rows["code"]}, out=tmp_path / "run", **options)
    names = {"sft": "dataset", "train": "prompts"}
    given = kept[0].options.to_json() | {names[recipe]: ",".join(map(str, files)), "out": tmp_path / "of files"}
    given = {name: value for name, value in given.items() if not name.startswith("evaluation") and value is not None}
    checked = (check_examples if recipe == "sft" else check_run)(type(kept[0].options)(**given))  # type: ignore[operator]
    taken, expected = (run.mixture().take(20) for run in (kept[0], checked))
    assert [(key, row.row, row.line, row.source.name) for key, row in taken] == [
        (key, row.row, row.line, row.source.stem) for key, row in expected
    ]
    shares = [by_source(kept[0].options.value(names[recipe]), [row for _, row in taken])]
    assert shares == [by_source(checked.options.value(names[recipe]), [row for _, row in expected])]
    assert set(shares[0]) == {"source_share/math", "source_share/code"}
    assert shares[0]["source_share/math"] == (0.75 if weights else 0.65)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"math": [{"text": "ab"}, {"text": 3}]}, "math, line 2: .*text. must be"),
        ({"a,b": [], "c": []}, "dataset has the names 'a,b', 'c'; give each a name of letters and digits"),
        ({}, "dataset has the names ; give each"),
        ({"math": []}, "math has no lines"),
        ({"math": {"text": ["ab"]}}, "rows must be an iterable of mappings, such as a list of dicts, got dict"),
        (type("DatasetDict", (dict,), {"column_names": {}})(train=[]), "rows must be an iterable .* got DatasetDict"),
    ],
)
def test_mistakes_in_named_rows_are_named(model: Path, tmp_path: Path, dataset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_on(model, dataset, reward=task.reward, out=tmp_path / "run", steps=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "ppo"}, "recipe='ppo' must be train, sft, dpo, reward, distill"),
        ({"recipe": "sft", "stps": 3}, "unknown option 'stps'; did you mean 'steps'"),
        ({"recipe": "sft", "steps": 3}, "dataset, line 1: there is no .completion."),
        ({"reward": lambda *_: 1.0}, "must be a function of a module that other processes import"),
        ({}, "missing: --reward"),
    ],
)
def test_mistakes_are_named(model: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_on(model, [{"prompt": "a"}], out=tmp_path / "run", **options)
