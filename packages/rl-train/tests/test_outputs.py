"""Where a command's results cannot go: one line that names the place and says what to do, before any work is done."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckpt.files import lock_file
from rl_train.cli.commands import app
from rl_train.loop.folder import check_unlocked, locked
from rl_train.loop.score import open_result
from rl_train.quickstart.task import make_checkpoint

# What does the work of the commands.
WORK = ("rl_train.quickstart.run.make_checkpoint", "rl_train.quickstart.run.train_in_place")
WORK += ("rl_train.loop.score.run_on_ranks", "rl_train.loop.recipe_run.run_on_ranks")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Each command that has an `--out`, with what it needs beside it."""
    folder = tmp_path_factory.mktemp("inputs")
    make_checkpoint(folder / "model", seed=0)
    (folder / "data.jsonl").write_text('{"text": "a"}\n')
    model, rewards = f"--model={folder / 'model'}", "--reward=math:fsum"
    train = ["train", model, f"--prompts={folder / 'data.jsonl'}", rewards, "--device=cpu", "--max-new-tokens=4"]
    return {
        "quickstart": ["quickstart", "--device=cpu"],
        "score": ["score", model, f"--data={folder / 'data.jsonl'}", "--device=cpu"],
        "train": train,
        "train --ray": [*train, "--ray"],
        "train --dry-run": [*train, "--dry-run"],
        "train --logger": [*train, "--logger=tensorboard"],
        "train ppo": [*train, "--algorithm=ppo"],
    }


@pytest.fixture
def refused(commands: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], str]:
    """Run a command that is to refuse its `--out`; returns what it says."""
    for name in WORK:
        monkeypatch.setattr(name, lambda *args, _name=name, **kwargs: pytest.fail(f"{_name} was called"))
    monkeypatch.setattr("rl_train.loop.run._on_ray", lambda *args: pytest.fail("Ray was asked"))

    def run(command: str, out: Path) -> str:
        result = CliRunner().invoke(app, [*commands[command], f"--out={out}"], catch_exceptions=False)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert "Errno" not in line
        return line

    return run


def everything(folder: Path) -> list[tuple[str, bytes | None]]:
    """The names in a folder and what the files hold."""
    return sorted((str(path), path.read_bytes() if path.is_file() else None) for path in folder.rglob("*"))


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A folder that takes no files; permissions do not stop root."""
    if os.geteuid() == 0:
        return Path("/proc")
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    return folder


@pytest.mark.parametrize("command", ["quickstart", "score", "train", "train --ray"])
@pytest.mark.parametrize("where", ["below a file", "in a closed folder", "with too long a name", "a link to nothing"])
def test_a_place_that_cannot_be_written(
    refused: Callable[[str, Path], str], tmp_path: Path, closed: Path, command: str, where: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "none" / "of" / "these")
    places = {"below a file": tmp_path / "file" / "out", "in a closed folder": closed / "out"}
    places |= {"with too long a name": tmp_path / ("long" * 99), "a link to nothing": tmp_path / "nowhere" / "out"}
    before = everything(tmp_path)
    said = refused(command, places[where])
    assert str(places[where]) in said
    assert "choose another" in said or "must be a file in a folder that exists" in said
    assert everything(tmp_path) == before


OCCUPIED: Sequence[tuple[str, str, str, str]] = [
    ("quickstart", "", "file", "exists and is no folder; choose another"),
    ("quickstart", "reward.png", "folder", "is a folder, and a file is to be written there; choose another"),
    ("quickstart", "start", "file", "exists and is no folder; choose another"),
    ("quickstart", "actor", "folder", "is no checkpoint (['mine']); choose another path or empty it"),
    ("quickstart", "critic", "file", "exists and is no folder; choose another"),
    ("score", "", "folder", "must be a file in a folder that exists"),
    ("train", "", "file", "exists and is no folder; choose another"),
    ("train", "options.json", "folder", "is a folder, and a file is to be written there; choose another"),
    ("train", "options.json", "file", "(char 0); remove it, or choose another out"),
    ("train", "metrics.jsonl", "folder", "is a folder, and a file is to be written there; choose another"),
    ("score", "", "file", "exists and is not a result of this command; choose another file, or remove it"),
    ("train", "training", "file", "is a file, so"),
    ("train", "training/actor", "file", "exists and is no folder; choose another"),
    ("train", "actor", "folder", "is no checkpoint (['mine']); choose another path or empty it"),
    ("train ppo", "training/critic", "file", "exists and is no folder; choose another"),
    ("train ppo", "critic", "folder", "is no checkpoint (['mine']); choose another path or empty it"),
    ("train --logger", "tensorboard", "file", "exists and is no folder; choose another"),
]


@pytest.mark.parametrize(("command", "name", "kind", "message"), OCCUPIED)
def test_something_else_in_its_place(
    refused: Callable[[str, Path], str], tmp_path: Path, command: str, name: str, kind: str, message: str
) -> None:
    out = tmp_path / "out"
    there = out / name
    (there if kind == "folder" else there.parent).mkdir(parents=True, exist_ok=True)
    (there / "mine" if kind == "folder" else there).write_text("not theirs")
    before = everything(tmp_path)
    said = refused(command, out)
    assert f"{there} " in said
    assert message in said
    assert everything(tmp_path) == before


@pytest.mark.parametrize(("command", "mark"), [("train", "options.json"), ("quickstart", "start")])
@pytest.mark.parametrize("held", ["thesis.txt", "metrics.jsonl", "a model"])
def test_a_folder_with_other_files(
    refused: Callable[[str, Path], str],
    commands: dict[str, list[str]],
    tmp_path: Path,
    command: str,
    mark: str,
    held: str,
) -> None:
    out = tmp_path / "out"
    if held == "a model":
        shutil.copytree(commands["score"][1].removeprefix("--model="), out)
    else:
        out.mkdir()
        (out / held).write_text("mine")
    (out / f".{mark}.saving").touch()  # as a killed run may leave it
    before = everything(tmp_path)
    said = refused(command, out)
    first = "config.json" if held == "a model" else held
    assert f"{out} holds other files, ['{first}'" in said
    assert f"and no {mark} of an earlier run; choose another out, or move them elsewhere" in said
    assert everything(tmp_path) == before


def test_scores_are_not_written_into_what_is_read(
    refused: Callable[[str, Path], str], commands: dict[str, list[str]]
) -> None:
    model, data = (Path(given.partition("=")[2]) for given in commands["score"][1:3])
    for out in (model / "scores.jsonl", model / "config.json", data):
        before = everything(model.parent)
        assert "an input; choose another file" in refused("score", out)
        assert everything(model.parent) == before


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_result_replaces_an_earlier_one_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    """Until then there is nothing to be seen of it, where files without a name are to be had."""
    if not unnamed:
        monkeypatch.setattr("ckpt.files.disk._unnamed_file", lambda folder: None)
    out = tmp_path / "scores.jsonl"
    for text in (
        '{"index": 0, "tokens": [], "log_probs": []}\n' * 2,
        '{"index": 0, "tokens": [1], "log_probs": [0]}\n',
    ):
        there = set(tmp_path.iterdir())
        with open_result(out) as file:
            file.write(text)
            assert (set(tmp_path.iterdir()) == there) == unnamed
        assert out.read_text() == text
        assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(ZeroDivisionError), open_result(out):
        raise ZeroDivisionError
    assert out.read_text() == text
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("command", ["quickstart", "train", "train --ray", "train --dry-run"])
def test_a_folder_in_which_a_run_is_at_work(refused: Callable[[str, Path], str], tmp_path: Path, command: str) -> None:
    with locked(tmp_path / "out"):
        before = everything(tmp_path)
        said = refused(command, tmp_path / "out")
        assert re.fullmatch(
            rf"error: process {os.getpid()} of \S+ runs in {tmp_path}/out; wait until it ends, or choose another path",
            said,
        )
        assert everything(tmp_path) == before
    check_unlocked(tmp_path / "out")
    assert everything(tmp_path / "out") == []


@pytest.mark.parametrize("command", ["quickstart", "train", "train --ray"])
def test_a_run_holds_its_folder_to_its_end(
    commands: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    out, held = tmp_path / "out", []

    def work(*args: Any, **kwargs: Any) -> dict[str, float]:
        with pytest.raises(ValueError, match=f"runs in {out}") as raised:
            check_unlocked(out)
        held.append(raised.value)
        return {}

    monkeypatch.setattr("rl_train.loop.recipe_run.run_on_ranks", work)
    monkeypatch.setattr("rl_train.loop.run._on_ray", work)
    monkeypatch.setattr("rl_train.quickstart.run._max_difference", lambda *_: 0.0)
    CliRunner().invoke(app, [*commands[command], f"--out={out}"])
    assert len(held) == 1
    check_unlocked(out)
    assert not lock_file(out / "options.json").exists()


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """Give the signals the handlers of a new process; Ray and background jobs of a shell change them."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize(
    ("command", "number", "said"),
    [
        ("quickstart", signal.SIGINT, "stopped by Ctrl-C: the same command starts again from the beginning"),
        ("score", signal.SIGTERM, "stopped by SIGTERM: {out} is incomplete; the same command starts again"),
        ("score", signal.SIGHUP, "stopped by SIGHUP: {out} is incomplete; the same command starts again"),
        (
            "train",
            signal.SIGINT,
            "stopped by Ctrl-C: 0 of 100 steps are done, and {out} has no training checkpoint; the same command starts "
            "from the beginning",
        ),
        (
            "train",
            signal.SIGTERM,
            "stopped by SIGTERM: 0 of 100 steps are done, and {out} has no training checkpoint; ",
        ),
    ],
)
def test_a_stopped_command_says_how_to_go_on_and_leaves_no_temporary_files(
    commands: dict[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    number: signal.Signals,
    said: str,
) -> None:
    out = tmp_path / "out"

    def work(*args: Any, **kwargs: Any) -> None:
        if command != "score":
            (out / ".actor.saving-1-ab").mkdir()  # as a save leaves it that was cut off
        os.kill(os.getpid(), number)
        time.sleep(9)

    monkeypatch.setattr(f"rl_train.loop.{'score' if command == 'score' else 'recipe_run'}.run_on_ranks", work)
    monkeypatch.setattr("rl_train.quickstart.run._max_difference", lambda *_: 0.0)
    monkeypatch.setattr("ckpt.files.disk._unnamed_file", lambda folder: None)
    result = CliRunner().invoke(app, [*commands[command], f"--out={out}"])
    assert result.exit_code == 128 + number
    assert result.stderr.splitlines()[-1].startswith(said.format(out=out))
    assert "Traceback" not in result.stderr
    assert [path.name for path in (tmp_path, *tmp_path.rglob("*")) if path.name.startswith(".")] == []
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)] == [signal.SIG_DFL] * 2


def test_scores_go_into_what_is_there_and_no_file(commands: dict[str, list[str]], tmp_path: Path) -> None:
    """A pipe, or a device such as /dev/null, is written to and stays what it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[Any] = []
    reader = threading.Thread(target=lambda: read.append(json.loads(pipe.read_text())))
    reader.start()
    result = CliRunner().invoke(app, [*commands["score"], f"--out={pipe}"])
    reader.join(timeout=60)
    assert result.exit_code == 0, result.output
    assert (read[0]["index"], read[0]["tokens"]) == (0, [1, 4])
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
