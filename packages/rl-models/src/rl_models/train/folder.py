"""The folder of a run, `--out`: what is written there, what may be there already, and what is never written over."""

from __future__ import annotations

import json
import os

from rl_models.preflight import check_output, check_writable
from rl_models.prompts import read_json
from rl_models.train.options import TrainOptions
from rl_models.train.report import read_metrics

# What a run reads for as long as it lasts, and again when it is resumed.
INPUTS = ("model", "critic", "reference", "prompts", "eval_prompts")
# An `options.json` without them is none of ours.
MARKS = {"model", "algorithm"}


def check_folder(options: TrainOptions) -> None:
    """Refuse a folder that cannot take the results, that the inputs stand in, or that holds another run or other files.

    Raises:
        ValueError: names what is in the way.
    """
    trained = ["actor", "critic"] if options.separate_critic else ["actor"]
    check_output(options.out, files=["options.json", "metrics.jsonl"], checkpoints=trained)
    folders = [f"training/{name}" for name in trained] + ["tensorboard"] * options.tensorboard
    for name in folders:
        check_writable(options.out / name)
    _check_inputs(options)
    before, metrics = options.out / "options.json", options.out / "metrics.jsonl"
    if before.is_file():
        try:
            found = read_json(before)
            if not (isinstance(found, dict) and found.keys() >= MARKS):
                raise ValueError(f"{before} is not of a run of rl-models train")
        except ValueError as error:
            raise ValueError(f"{error}; remove it, or choose another out") from None
        options.check_resumes(found)
    elif metrics.is_file():
        raise ValueError(f"{metrics} is of no run, for it has no {before}; remove it, or choose another out")
    read_metrics(metrics)


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
    """Make the folder, with the options of the run that it belongs to."""
    options.out.mkdir(parents=True, exist_ok=True)
    temporary = options.out / f".options.{os.getpid()}"
    temporary.write_text(json.dumps(options.to_json(), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, options.out / "options.json")
