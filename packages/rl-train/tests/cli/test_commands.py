"""The command prints foreign text safely: errors, warnings and paths."""

from __future__ import annotations

import os
import shlex
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from rl_train.cli.commands import app
from rl_train.processes.errors import RankFailed

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b2J\u202e[red]" + os.fsdecode(b"\xff")
WRITTEN_OUT = r"\x1b]0;title\x07\x1b[2J\x9b2J\u202e[red]\udcff"


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError(HOSTILE), 2), (RankFailed(f"rank 0 failed:\n{HOSTILE}"), 1), (RuntimeError(HOSTILE), 1), (None, 0)],
)
def test_foreign_text_does_not_rule_the_terminal(
    error: Exception | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_page(folder: Path) -> Path:
        print(warnings.formatwarning(UserWarning(HOSTILE), UserWarning, "page.py", 1), end="")
        if error is not None:
            raise error
        return folder / HOSTILE

    monkeypatch.setattr("rl_train.report.html_report.write_page", write_page)
    monkeypatch.setattr("rl_train.report.html_report.write_curves", lambda folder: None)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == status
    assert all(letter.isprintable() or letter == "\n" for letter in result.output)
    assert f"warning: {WRITTEN_OUT}\n" in result.stdout
    assert WRITTEN_OUT in (result.stdout.splitlines()[-1] if error is None else result.stderr)


def test_an_unforeseen_error_has_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_train.report.html_report.write_page", lambda folder: {}["a key"])
    result = CliRunner().invoke(app, ["report", "run"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert result.stderr.endswith("KeyError: 'a key'\n")


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"rl-train {version('rl-train')}\n")


def test_the_examples_of_every_command_are_understood() -> None:
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        title, *examples = command.epilog.split("\n\n")
        assert title == "Examples:"
        for example in examples:
            program, chosen, *arguments = shlex.split(example)
            assert (program, chosen) == ("rl-train", name)
            command.make_context(name, arguments)
