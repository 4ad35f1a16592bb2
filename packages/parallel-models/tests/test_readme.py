"""The program of the README runs as printed, and its table has every public name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import parallel_models

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_program_runs_as_printed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model learns its two texts by heart, and continues them."""
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (tmp_path / "checkpoint").symlink_to(llama)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("[tensor([ 7,  9, 11]), tensor([4, 2,")
    assert (tmp_path / "learned" / "model.safetensors").exists()


def test_every_public_name_is_there_and_in_the_table() -> None:
    table = {name for row in re.findall(r"^\| (.*?) \|", README, re.MULTILINE) for name in re.findall(r"`(\w+)", row)}
    for name in parallel_models.__all__:
        assert getattr(parallel_models, name) is not None
        assert name in table, name
