"""The root README's examples run as printed."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_models import Actor
from rl_models.backends import BACKENDS
from rl_train.quickstart import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The programs of the page, in a folder with a checkpoint."""
    make_checkpoint(tmp_path / "checkpoint", seed=0)
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    files = [tmp_path / f"example_{number}.py" for number in range(len(programs))]
    for file, program in zip(files, programs, strict=True):
        file.write_text(program)
    return files


def test_examples_run_as_printed(examples: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one up to the start of its ranks, with its options, rows and reward checked."""
    runs: list[Any] = []
    monkeypatch.setattr("rl_train.loop.run.train", lambda run, on_event: runs.append(run))
    for program in examples:
        runpy.run_path(str(program), run_name="__main__")
    assert len(examples) == 2
    assert len(runs) == 1


@pytest.mark.slow
def test_the_first_example_learns(examples: list[Path]) -> None:
    subprocess.run([sys.executable, str(examples[0])], check=True, timeout=280)
    Actor.from_pretrained("run/actor", device="cpu")


@pytest.mark.parametrize(("language", "columns"), [("bash", 46), ("python", 80)])
def test_the_code_of_the_first_page_fits_a_phone(language: str, columns: int) -> None:
    """GitHub cuts longer lines of commands, and shows little of longer programs."""
    code = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert code
    assert [line for block in code for line in block.splitlines() if len(line) > columns] == []


def test_the_table_of_options_says_what_each_backend_lacks() -> None:
    text = (ROOT / "docs" / "rl-models.md").read_text()
    header, _, *rows = re.findall(r"^\|(.*)\|$", text.partition("### Options that save")[2], re.MULTILINE)
    backends = re.findall(r"`(\w+)`", header)
    assert sorted(backends) == sorted(BACKENDS)
    assert len(rows) >= 5
    for row in rows:
        name, *cells = (cell.strip() for cell in row.split("|"))
        for backend, cell in zip(backends, cells, strict=True):
            reason = BACKENDS[backend].lacks.get(name.strip("`"))
            assert cell == f"no: {reason}" if reason else cell.startswith("yes"), f"{name} of {backend}: {cell}"
