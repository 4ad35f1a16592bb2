"""The folder of a run is checked before its ranks start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt.training import capture_rng
from rl_train.loop.folder import check_folder, write_options
from rl_train.options.options import TrainOptions


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    """The options of a run of 34 steps with two training checkpoints."""
    run = TrainOptions(model=tmp_path / "m", prompts=tmp_path / "p", reward="r:f", out=tmp_path / "run", steps=34)
    write_options(run)
    state = {"step": 0, "extra": {}, "files": ["rank-00000.safetensors"], "rng": [capture_rng()]}
    for step in (20, 34):
        folder = run.out / "training" / "actor" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "rank-00000.safetensors").touch()
        (folder / "state.json").write_text(json.dumps(state | {"step": step}))
    (run.out / "training" / "actor" / "latest").write_text("step-00000034\n")
    return run


def test_fewer_steps_than_are_done_are_refused(options: TrainOptions) -> None:
    actor = options.out / "training" / "actor"
    check_folder(options)
    fewer = options.model_copy(update={"steps": 20})
    with pytest.raises(ValueError, match=r"steps=20, but .*/run has gone on to step 34; give --steps 34 or more"):
        check_folder(fewer)
    (actor / "latest").write_text("step-00000020\n")  # as the error says
    check_folder(fewer)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("latest", "step-00000030", "latest names 'step-00000030', which is no checkpoint; write the name of a step"),
        ("step-00000034/state.json", "{}", "state.json is malformed"),
        ("step-00000034/rank-00001.safetensors", "", "lists other files than the folder holds"),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_is_found_before_the_ranks_start(
    options: TrainOptions, file: str, text: str, message: str
) -> None:
    (options.out / "training" / "actor" / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        check_folder(options)
