"""Every benchmark that a CPU can run does run, at small sizes; the figures themselves mean nothing there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Name -> (ranks, arguments).
RUNS = {
    "attention": (1, ["--tiny", "--rounds", "1"]),
    "invariant": (2, ["--tiny", "--rounds", "1"]),
    "step": (2, ["--tiny", "--rounds", "1"]),
    "context_parallel": (2, ["--tiny", "--rounds", "1"]),
    "huggingface": (2, ["--tiny", "--rounds", "1", "--tokens", "256"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_benchmark_runs(name: str, tmp_path: Path) -> None:
    ranks, arguments = RUNS[name]
    report = tmp_path / "report.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "benchmarks" / f"{name}.py"), *arguments, "--json", str(report)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr
    assert "| " in run.stdout
    assert json.loads(report.read_text())["machine"]["torch"]
