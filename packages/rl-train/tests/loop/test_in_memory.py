"""`train_on`: one call with rows from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_models import Actor
from rl_train.loop import train_on
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
