"""`rl-train train --ray` as a program that joins a cluster of two nodes which is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REWARD = '''
def sevens(prompt, response, row):
    """The share of one token."""
    return response.count(7) / len(response)
'''


@pytest.mark.slow
def test_a_run_on_the_cluster_of_the_environment(ray_cluster: Any, checkpoint: Path, tmp_path: Path) -> None:
    import ray

    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"tokens": [1, n]}) + "\n" for n in range(6)))
    given = {
        "model": checkpoint, "prompts": tmp_path / "prompts.jsonl", "reward": "reward:sevens", "device": "cpu",
        "algorithm": "ppo", "dims": "dp=2", "critic-dims": "tp=2", "steps": 2, "prompts-per-step": 6,
        "max-new-tokens": 8, "learning-rate": 1e-2, "save-every": 2,
    }  # fmt: skip
    placements = len(ray.util.placement_group_table())
    curves = []
    for flag in ("--no-ray", "--ray"):
        out = tmp_path / flag.strip("-")
        command = [*(f"--{name}={value}" for name, value in given.items()), f"--out={out}", flag]
        result = subprocess.run(
            [sys.executable, "-m", "rl_train", "train", *command],
            cwd=tmp_path,
            env=os.environ | {"RAY_ADDRESS": ray_cluster.address},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert result.returncode == 0, result.stderr
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        curves.append([{name: x for name, x in record.items() if "second" not in name} for record in records])
        assert (out / "actor" / "model.safetensors").is_file()
    assert len(ray.util.placement_group_table()) == placements + 1, "it ran on this cluster"
    assert len(curves[0]) == 2
    for one, other in zip(*curves, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
