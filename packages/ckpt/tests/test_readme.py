"""The README's program runs as printed, and its requirements are the package's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from ckpt import layout_for, load_hf

PACKAGE = Path(__file__).resolve().parent.parent
README = (PACKAGE / "README.md").read_text()


def test_the_program_runs_on_two_ranks(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (tmp_path / "halve.py").write_text(program)
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
    saved, original = load_hf(out, layout_for(out)), load_hf(source, layout_for(source))
    assert all((saved[name] == tensor.bfloat16() / 2).all() for name, tensor in original.items())
    assert (out / "generation_config.json").is_file()


def test_the_requirements_are_those_of_the_package() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert f"pip install {project['name']}\n" in README
    for requirement in (f"Python{project['requires-python']}", *project["dependencies"]):
        assert requirement.replace(">=", " >= ") in README
