"""Prompts and rewards of reasoning-gym, and the mistakes in their names."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rl_train.data.prompts import read_prompts
from rl_train.environments.reasoning_gym import _dataset
from rl_train.options.derived import check
from rl_train.options.options import TrainOptions
from rl_train.options.resolve import resolve
from rl_train.rewards import Response
from rl_train.rewards.function import Rewards

TASK = "reasoning_gym:chain_sum,size=4,max_terms=2"


def test_an_environment_gives_prompts_and_reward() -> None:
    options = resolve(TrainOptions, None, {"model": "m", "environment": TASK})
    check(options)
    assert (options.prompts, options.reward) == (Path(TASK), "reasoning-gym")
    assert TrainOptions(model=Path("m"), environment=TASK, reward="regex").reward == "regex"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (
            {"environment": "gym", "prompts": "p"},
            "environment='gym' must be reasoning_gym:TASK, verifiers:TASK, such as .* or module:class",
        ),
        ({"environment": TASK, "prompts": "p"}, "prompts=p and environment=.* both state the prompts; leave one"),
    ],
)
def test_an_environment_that_is_none_is_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        check(resolve(TrainOptions, None, {"model": "m"} | given))


def test_without_the_extra_the_environment_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    _dataset.cache_clear()
    with pytest.raises(ValueError, match=r"chain_sum needs reasoning-gym \(.*\); pip install reasoning-gym drawsvg"):
        read_prompts(Path("reasoning_gym:chain_sum"), model, 999)


def test_questions_are_drawn_by_seed_and_scored(model: Path) -> None:
    pytest.importorskip("reasoning_gym")
    prompts = read_prompts(Path(TASK), model, 999)
    assert len(prompts) == 4
    rows = [prompt.row for prompt in prompts]
    assert rows == [prompt.row for prompt in read_prompts(Path(TASK), model, 999)]
    assert rows != [prompt.row for prompt in read_prompts(Path(f"{TASK},seed=1"), model, 999)]
    texts = [f"<answer>{rows[0]['answer']}</answer>", rows[1]["answer"], "<answer>no</answer>", "no"]
    items = [(row["text"], Response(text), json.loads(json.dumps(row))) for text, row in zip(texts, rows, strict=True)]
    with closing(Rewards(TrainOptions(model=Path("m"), environment=TASK))) as rewards:
        found = rewards.score(items, [""] * 4)
    assert found.total == [1, 1, 0, 0]
    assert found.answers == [rows[0]["answer"], rows[1]["answer"], "no", "no"]


def test_with_a_chat_template_a_question_is_a_message(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (prompt, *_) = read_prompts(Path(TASK), tmp_path, 999)
    assert isinstance(prompt.row["messages"], str)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("chain_su", "reasoning-gym has no task 'chain_su'; did you mean 'chain_sum'"),
        ("chain_sum,terms=3", "terms"),
        ("chain_sum,max_terms", "'max_terms' must be an option and a number, such as max_terms=3"),
        ("chain_sum,min_terms=9", "max_terms must be >= min_terms"),
    ],
)
def test_a_task_or_an_option_that_is_none_is_named(model: Path, source: str, error: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=f"reasoning_gym:{source}: .*{error}"):
        read_prompts(Path(f"reasoning_gym:{source}"), model, 999)
