"""Two machines at one URL: the second one is refused, and one takes the place of a machine that is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ckpt.files import Store
from rl_train.loop import url_lock
from rl_train.loop.folder import check_foreign, check_unlocked, locked
from rl_train.loop.recipe import STOP
from rl_train.loop.run_store import RunStore
from rl_train.options.fields import working_copy
from rl_train.report.loggers import Loggers

OBJECT = "/bucket/run/.options.json.held"
Machine = Callable[[str], Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Go on as a machine of a name, which has a cache of its own; return its folder of the run."""
    for name, seconds in (("_BEAT", 0.02), ("_SILENCE", 0.3), ("_LOOK", 0.01)):
        monkeypatch.setattr(url_lock, name, seconds)

    def become(name: str) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return working_copy(Path("memory://bucket/run"))

    yield become
    fsspec.filesystem("memory").store.clear()


def store_of(folder: Path, url: str = "memory://bucket/run") -> RunStore:
    store = Store.of(url)
    assert store is not None
    return RunStore(folder, store)


def push(folder: Path) -> None:
    (folder / "options.json").write_text("{}")
    store_of(folder).push()


def killed(folder: Path) -> None:
    """Leave what a killed run leaves: the object and the file, and nothing that changes them."""
    with locked(folder):
        text = fsspec.filesystem("memory").cat_file(OBJECT)
    fsspec.filesystem("memory").pipe_file(OBJECT, text)


def test_a_second_machine_is_refused_and_the_first_one_goes_on(machine: Machine) -> None:
    here, told = machine("here"), list[Any]()
    with locked(here, told.append):
        check_foreign(here, mark="options.json")
        there = machine("there")
        with (
            pytest.raises(ValueError, match=r"process \d+ of .*, since 20.* UTC .* runs at memory://bucket/run; wait"),
            locked(there, told.append),
        ):
            pass
        with pytest.raises(ValueError, match=r"another machine goes on with this run: process \d+ of "):
            push(there)
        push(here)
    assert len(told) == 1
    assert "ran at memory://bucket/run; waiting 0.3 s for a sign of its life" in told[0]["message"]
    assert not fsspec.filesystem("memory").exists(OBJECT), "the end removes the object"
    with locked(there, told.append):
        push(there)
    assert len(told) == 1


def test_a_dry_run_names_a_run_at_the_url_and_takes_nothing(machine: Machine) -> None:
    here, there, told = machine("here"), machine("there"), list[Any]()
    files = fsspec.filesystem("memory")
    machine("here")
    with locked(here):
        machine("there")
        with pytest.raises(ValueError, match=r"^process \d+ of .* runs at memory://bucket/run; wait until it ends, or"):
            check_unlocked(there, told.append)
        assert [list(event) for event in told] == [["message"]]
    check_unlocked(there, told.append)
    assert not files.exists(OBJECT)
    machine("here")
    killed(here)
    machine("there")
    text = files.cat_file(OBJECT)
    check_unlocked(there, told.append)
    assert len(told) == 2
    assert files.cat_file(OBJECT) == text, "another run's place is not taken"
    assert not there.exists()


@pytest.mark.parametrize("taken", [OBJECT, "/bucket/run/training/actor/latest"])
def test_a_run_whose_place_is_taken_saves_its_next_step_and_ends(machine: Machine, taken: str) -> None:
    """The file `stop` has the loop save after the step under way, and end."""
    here, files = machine("here"), fsspec.filesystem("memory")

    def run() -> None:
        with locked(here), store_of(here).pushed(lambda event: None) as follow:
            push(here)
            files.pipe_file(taken, b"step-00000009 of another run")
            follow({"step": 1})
            for _ in range(500):
                follow({"phase": "generating"})
                if (here / STOP).exists():
                    return
                time.sleep(0.01)

    error = (
        "another machine goes on with this run: .*; let one machine alone run it. This machine has ended, and keeps "
    )
    with pytest.raises(ValueError, match=f"{error}its own steps in {here}$"):
        run()
    assert (here / STOP).exists()
    assert not files.exists(f"/bucket/run/{STOP}")


def test_another_machine_takes_the_place_of_a_killed_one_which_then_uploads_nothing(machine: Machine) -> None:
    here, told = machine("here"), list[Any]()
    killed(here)
    there = machine("there")
    begin = time.monotonic()
    with locked(there, told.append):
        assert time.monotonic() - begin >= 0.3
        push(there)
        with pytest.raises(ValueError, match=r"another machine goes on with this run: process \d+ of "):
            push(here)
        time.sleep(0.1)
        with pytest.raises(ValueError, match="another machine goes on with this run"):
            push(here)
    assert len(told) == 1


def test_the_machine_of_a_killed_run_does_not_wait(machine: Machine) -> None:
    here, told = machine("here"), list[Any]()
    killed(here)
    with locked(here, told.append):
        push(here)
    assert told == []


def test_a_machine_that_was_replaced_leaves_the_object_of_the_other_one(machine: Machine) -> None:
    with locked(machine("here")):
        fsspec.filesystem("memory").pipe_file(OBJECT, b"process 1 of there\n7")
        time.sleep(0.1)
    assert fsspec.filesystem("memory").cat_file(OBJECT) == b"process 1 of there\n7"


@pytest.mark.parametrize("other", [b"process 1 of there\n", None])
@pytest.mark.parametrize("error", [FileExistsError(), NotImplementedError(), TypeError("mode"), OSError("412")])
def test_of_two_runs_that_begin_together_one_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception, other: bytes | None
) -> None:
    """The other one has created the object first. Without another one a store needs no conditional writes."""
    files = fsspec.filesystem("memory")
    pipe = type(files).pipe_file

    def created(self: Any, path: str, value: bytes, **options: Any) -> None:
        if not options:
            pipe(self, path, value)
            return
        if other is not None:
            pipe(self, path, other)
        raise error

    monkeypatch.setattr(type(files), "pipe_file", created)
    if other is not None:
        with pytest.raises(ValueError, match=r"^process 1 of there runs at memory://bucket/run"), locked(machine("x")):
            pass
    elif not isinstance(error, FileExistsError):
        with locked(machine("x")):
            push(machine("x"))


def test_a_store_that_cannot_be_written_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", refused)
    error = r"memory://bucket/run cannot be locked: PermissionError\('no'\)"
    with pytest.raises(ValueError, match=error), locked(machine("here")):
        pass


def test_a_run_at_a_url_with_folders_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = working_copy(Path(f"file://{tmp_path}/bucket/run"))
    with locked(folder):
        (folder / "training/actor").mkdir(parents=True)
        (folder / "training/actor/latest").write_text("step-00000001")
        store_of(folder, f"file://{tmp_path}/bucket/run").push()
    assert (tmp_path / "bucket/run/training/actor/latest").read_text() == "step-00000001"


def test_an_upload_into_nowhere_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any) -> None:
        raise FileNotFoundError("the bucket does not exist")

    with locked(machine("here")):
        monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", missing)
        with pytest.raises(FileNotFoundError, match="bucket does not exist"):
            push(machine("here"))


def test_a_run_that_goes_on_elsewhere_has_its_id_in_loggers(machine: Machine) -> None:
    here = machine("here")

    def identity(folder: Path, done: int) -> str:
        Loggers("tensorboard", folder, {}, done, lambda text: None).close()
        return (folder / ".logged-run").read_text()

    with locked(here):
        first = identity(here, 0)
        push(here)
    there = machine("there")
    store_of(there).pull()
    assert identity(there, 1) == first
    assert identity(there, 0) != first
