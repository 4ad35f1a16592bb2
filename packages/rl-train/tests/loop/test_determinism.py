"""`rl-train train --engine.deterministic`: a run and its repetition are the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rl_train.cli.commands import app

PLACES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu(2))]


@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize("device", PLACES)
def test_a_run_twice(model: Path, prompts: Path, tmp_path: Path, device: str) -> None:
    """Two steps of PPO on two ranks, with the log-probs of `--engine.tp-invariant`: metrics and weights."""

    def run(out: Path) -> tuple[list[dict[str, Any]], bytes]:
        given: dict[str, Any] = {
            "model": model, "prompts": prompts, "reward": "rewards:alphabet", "out": out, "device": device,
            "algorithm": "ppo", "dims": "tp=2", "steps": 2, "prompts-per-step": 8, "max-new-tokens": 6,
            "learning-rate": 1e-2, "save-every": 0,
        }  # fmt: skip
        options = [f"--{name}={value}" for name, value in given.items()]
        result = CliRunner().invoke(app, ["train", *options, "--engine.tp-invariant", "--engine.deterministic"])
        assert result.exit_code == 0, result.output
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        weights = b"".join(file.read_bytes() for file in sorted((out / "actor").glob("*.safetensors")))
        return [{name: value for name, value in record.items() if "second" not in name} for record in records], weights

    first, second = run(tmp_path / "first"), run(tmp_path / "second")
    assert len(first[0]) == 2
    assert first[1]
    assert first == second
