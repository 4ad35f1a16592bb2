"""Options from a file and the command line: types, names, what is missing, what may change when a run is resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from parallel_layers import ParallelDims
from rl_models.train.options import TrainOptions, resolve_options

NEEDED: dict[str, Any] = {"model": Path("m"), "prompts": Path("p"), "reward": "r:f"}

YAML = """
model: from-file
prompts: p.jsonl
reward: r:f
algorithm: ppo
dims: {tp: 2, pp: 2}
learning-rate: 1e-5
kl_coefficient: 1
stop_ids: [2, 7]
tensorboard: true
"""
TOML = """
model = "from-file"
prompts = "p.jsonl"
reward = "r:f"
algorithm = "ppo"
dims = "tp=2,pp=2"
learning-rate = 1e-5
kl_coefficient = 1
stop_ids = "2,7"
tensorboard = true
"""


@pytest.mark.parametrize(("name", "text"), [("run.yaml", YAML), ("run.toml", TOML)])
def test_a_file_holds_the_same_options_and_the_command_line_wins(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    options = resolve_options(tmp_path / name, {"model": "from-command-line", "steps": None, "seed": 3})
    assert options == TrainOptions(
        model=Path("from-command-line"),
        prompts=Path("p.jsonl"),
        reward="r:f",
        algorithm="ppo",
        dims="tp=2,pp=2",
        learning_rate=1e-5,
        kl_coefficient=1.0,
        stop_ids="2,7",
        tensorboard=True,
        seed=3,
    )
    assert options.grid == ParallelDims(tp=2, pp=2)
    assert options.stops == (2, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "run.yaml: unknown option 'learning_rat'; did you mean 'learning_rate'?"),
        ("steps: many", 'run.yaml: steps must be int, got "many"'),
        ("steps: 2.5", "run.yaml: steps must be int, got 2.5"),
        ("steps: true", "run.yaml: steps must be int, got true"),
        ("ray: 1", "run.yaml: ray must be bool, got 1"),
        ("model: [a]", 'run.yaml: model must be Path, got ["a"]'),
        ("- steps", "must hold options by name, got list"),
        ("steps: [", "is not valid YAML"),
        ("steps: 2", "missing: --model, --prompts, --reward"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=message.replace("?", r"\?").replace("[", r"\[")):
        resolve_options(tmp_path / "run.yaml", {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "pop"}, "algorithm 'pop' is unknown; known: ppo, grpo"),
        ({"samples": 1}, "grpo compares the responses to a prompt; samples=1 must be >= 2"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"dims": "tq=2"}, "cannot read 'tq=2'"),
        ({"stop_ids": "a"}, "stop_ids='a' must be numbers"),
        ({"critic": Path("c")}, "grpo has no critic"),
        ({"schedule": "wsd"}, "schedule 'wsd' needs decay_steps"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"overlong_buffer": 300}, "overlong_buffer=300 is more than max_new_tokens=256"),
    ],
)
def test_values_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(**NEEDED, **options)


def test_schedules_count_steps_of_the_run() -> None:
    options = TrainOptions(
        **NEEDED, steps=10, prompts_per_step=4, samples=2, mini_batch=3, epochs=2, schedule="linear", warmup_steps=2
    )
    assert options.updates_per_step == 6
    schedule = options.optimizer(1.0).schedule
    assert (schedule.warmup_steps, schedule.total_steps) == (12, 60)


def test_what_a_resumed_run_may_change() -> None:
    options = TrainOptions(**NEEDED)
    dataclasses.replace(options, steps=500, dims="tp=2", device="cpu").check_resumes(options.to_json())
    with pytest.raises(ValueError, match=r"run holds a run with seed=0, this one has 1; choose another out"):
        dataclasses.replace(options, seed=1).check_resumes(options.to_json())
