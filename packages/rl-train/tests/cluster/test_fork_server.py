"""The server that forks ranks: what it imports, and when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from parallel_layers.device import ASKS_NVML
from rl_train.cluster.fork_server import prepare


@pytest.mark.parametrize("before", [None, "0"])
def test_the_server_imports_modules_and_asks_no_driver(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    seen = list[object]()
    monkeypatch.setattr(forkserver, "set_forkserver_preload", seen.append)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: seen.append(os.environ[ASKS_NVML]))
    monkeypatch.setenv(ASKS_NVML, before or "")
    if before is None:
        monkeypatch.delenv(ASKS_NVML)
    prepare("one", "two")
    assert seen == [["one", "two", "torch._dynamo"], "1"]
    assert os.environ.get(ASKS_NVML) == before


PROGRAM = """
import sys
from multiprocessing import forkserver
from typer.testing import CliRunner
from rl_train.cli.commands import app

def ensure_running():
    assert "torch" not in sys.modules, "the server starts before torch is imported, which takes seconds"
    assert module in forkserver._forkserver._preload_modules
    raise SystemExit(7)

forkserver.ensure_running = ensure_running
places = ["--out", "run", "--model", "model"]
commands = {
    "train": ["rl_train.loop.run", *places, "--prompts", "rows", "--reward", "number-match"],
    "sft": ["rl_train.loop.file_recipe", *places, "--dataset", "rows"],
    "evaluate": ["rl_train.loop.draw_run", "model", "--prompts", "rows", "--reward", "number-match"],
    "score": ["rl_train.loop.score", "--model", "model", "--data", "rows"],
}
for name, (module, *arguments) in commands.items():
    result = CliRunner().invoke(app, [name, *arguments])
    assert result.exit_code == 7, (name, result.output, result.exception)
"""


def test_commands_start_it_first(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
