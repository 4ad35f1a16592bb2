"""The folder of a run, `--out`: check it, write its options, and find the step to resume from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ckpt
from rl_train.data.prompts import read_json
from rl_train.options.options import TrainOptions
from rl_train.planner.preflight import check_foreign, check_output, check_writable, remove_leftovers, replace_text
from rl_train.report import read_metrics

# Options whose paths a run reads, and reads again when it is resumed.
INPUTS = ("model", "critic", "reference", "prompts", "eval_prompts")
# The keys of every `options.json` of a run.
MARKS = {"model", "algorithm"}


def check_folder(options: TrainOptions) -> None:
    """Refuse a folder that cannot take the results, holds another run or other files, or would replace an input.

    Raises:
        ValueError: A path is in the way; the error names it.
    """
    trained = _trained(options)
    check_output(options.out, files=["options.json", "metrics.jsonl"], checkpoints=trained)
    folders = [f"training/{name}" for name in trained] + ["tensorboard"] * options.tensorboard
    for name in folders:
        check_writable(options.out / name)
    _check_inputs(options)
    check_foreign(options.out, mark="options.json")
    before = options.out / "options.json"
    if before.is_file():
        try:
            found = read_json(before)
            if not (isinstance(found, dict) and found.keys() >= MARKS):
                raise ValueError(f"{before} is not of a run of rl-train train")
        except ValueError as error:
            raise ValueError(f"{error}; remove it, or choose another out") from None
        options.check_resumes(found)
    read_metrics(options.out / "metrics.jsonl")


def _check_inputs(options: TrainOptions) -> None:
    """Refuse inputs that a result or a training checkpoint would replace."""
    for name in INPUTS:
        if (given := getattr(options, name)) is None:
            continue
        for replaced in (options.out / part for part in ("actor", "critic", "training")):
            if given.resolve().is_relative_to(replaced.resolve()):
                raise ValueError(
                    f"{name}={given} is in {replaced}, which the results of this run replace; choose another out than "
                    f"{options.out}"
                )


def write_options(options: TrainOptions) -> None:
    """Create the folder and write the options of the run."""
    options.out.mkdir(parents=True, exist_ok=True)
    replace_text(options.out / "options.json", json.dumps(options.to_json(), indent=2) + "\n")


def _trained(options: TrainOptions) -> list[str]:
    """Return the names of the models that learn; their folders have the same names."""
    return ["actor", "critic"] if options.separate_critic else ["actor"]


@contextmanager
def saves_cleaned(options: TrainOptions) -> Iterator[None]:
    """Remove the remains of interrupted saves, before and after the run inside."""
    folders = options.out, *(options.out / "training" / name for name in _trained(options))
    remove_leftovers(*folders)
    try:
        yield
    finally:
        remove_leftovers(*folders)


def how_to_go_on(options: TrainOptions) -> str:
    """Return a sentence about the steps that a stopped run has done, and about what the same command does next."""
    done = read_metrics(options.out / "metrics.jsonl")
    steps = f"{int(done[-1]['step']) if done else 0} of {options.steps} steps are done"
    saved = newest_step(options.out / "training", _trained(options))
    if not saved:
        return f"{steps}, and {options.out} has no training checkpoint; the same command starts from the beginning"
    return f"{steps}; the same command goes on after step {saved}, the newest training checkpoint in {options.out}"


def newest_step(training: Path, models: Iterable[str]) -> int:
    """Return the newest step at which all of these models have a training checkpoint; 0 without one.

    Checkpoints after the step that `latest` names are ignored: the run has been set back behind them.

    Raises:
        ValueError: The `latest` of a model is damaged; the error names the file.
    """
    common = set.intersection(*(set(ckpt.steps_of_latest(training / name)) for name in models))
    return max(common, default=0)
