"""The README's program runs as printed, and its requirements are the package's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ckpt import layout_for, load_hf
from parallel_layers.testing import RankPool

PACKAGE = Path(__file__).resolve().parent.parent
README = (PACKAGE / "README.md").read_text()


(PROGRAM,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def check(source: Path, out: Path) -> None:
    saved, original = load_hf(out, layout_for(out)), load_hf(source, layout_for(source))
    assert all((saved[name] == tensor.bfloat16() / 2).all() for name, tensor in original.items())
    assert (out / "generation_config.json").is_file()


def run_program(group: ProcessGroup, *arguments: str) -> None:
    """Run the program on ranks that have their default process group already."""
    kept = {"init_process_group": lambda backend: None, "destroy_process_group": lambda: None}
    with mock.patch.object(sys, "argv", ["halve.py", *arguments]), mock.patch.multiple(dist, **kept):
        exec(compile(PROGRAM, "README.md", "exec"), {"__name__": "__main__"})


def test_the_program_runs(ranks: RankPool, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source, out = checkpoint("llama"), tmp_path / "out"
    ranks.run(run_program, str(source), str(out))
    check(source, out)


@pytest.mark.slow
def test_the_program_runs_on_two_ranks(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "halve.py").write_text(PROGRAM)
    source, out = checkpoint("llama"), tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "halve.py"]
    done = subprocess.run(
        [*command, str(source), str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    check(source, out)


def test_the_requirements_are_those_of_the_package() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert f"pip install ./packages/{PACKAGE.name} " in README
    for requirement in (f"Python{project['requires-python']}", *project["dependencies"]):
        assert requirement.replace(">=", " >= ") in README
