"""Megatron-Core reads its global state in the recorded lines alone; this package reads one flag of it."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("core_reads.py")
RECORD = json.loads(SCRIPT.with_suffix(".json").read_text())


@pytest.mark.slow
def test_the_lines_that_read_global_state_are_recorded() -> None:
    version = importlib.metadata.version("megatron-core")
    assert version in RECORD, f"no lines are recorded for {version}: run python {SCRIPT} --record"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == RECORD[version]


@pytest.mark.parametrize("version", RECORD)
def test_this_package_asks_for_the_active_grid_alone(version: str) -> None:
    reads = [line for line in RECORD[version] if line.startswith("megatron_utils/")]
    assert reads == ["megatron_utils/core_state.py is_initialized"]
