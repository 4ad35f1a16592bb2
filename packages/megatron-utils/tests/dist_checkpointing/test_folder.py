"""Whenever a save dies, what is found is the last complete checkpoint, whole."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from megatron_utils.dist_checkpointing import folder as folders, latest_step


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it and tidy up."""


def release_all() -> None:
    """Give up the locks of partial folders, as the end of a process does."""
    for folder in list(folders._locks):
        folders.release(folder)


def save(root: Path, step: int) -> None:
    folder = folders.begin(root, step)
    write(folder, step)
    folders.commit(folder, step)


def write(folder: Path, step: int) -> None:
    for number in range(3):
        (folder / f"__{number}_0.distcp").write_bytes(bytes([step]) * 100)
    folders.write_json(folder / folders.STATE, {"step": step})
    folders.write_json(folder / folders.MANIFEST, folders.describe_files(folder, 0, 1))


def check(root: Path, step: int) -> None:
    assert latest_step(root) == step
    assert folders.check_files(folders.step_folder(root, step), 0, 1, contents=True) == []


def test_a_kill_at_any_file_operation_leaves_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    calls = 0
    limit = 0

    def deadly(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise Killed
            return real(*args, **kwargs)

        return call

    real = {name: getattr(os, name) for name in ("rename", "replace", "fsync", "mkdir")}
    step = 1
    while True:
        calls = 0
        for name, function in real.items():
            monkeypatch.setattr(os, name, deadly(function))
        try:
            save(tmp_path, step + 1)
            done = True
        except Killed:
            done = False
            release_all()
        finally:
            for name, function in real.items():
                monkeypatch.setattr(os, name, function)
        # The rename is the moment, whether or not the pointer has been moved.
        assert (latest_step(tmp_path) == step + 1) is folders.step_folder(tmp_path, step + 1).exists()
        assert all(folders.step_folder(tmp_path, earlier).is_dir() for earlier in range(1, step + 1))
        if folders.step_folder(tmp_path, step + 1).exists():
            folder = folders.step_folder(tmp_path, step + 1)
            assert folders.check_files(folder, 0, 1, contents=True) == []
        latest = latest_step(tmp_path)
        assert latest in (step, step + 1)
        check(tmp_path, latest)
        step = latest
        if done:
            break
        limit += 1
    assert limit > 8
    # The next save removes what the dead ones left.
    save(tmp_path, step + 1)
    check(tmp_path, step + 1)
    assert not list(tmp_path.glob(".step-*"))


def test_complete_checkpoints_are_never_removed(tmp_path: Path) -> None:
    for step in (100, 200, 150):  # from 100 the run has gone on anew
        save(tmp_path, step)
    (tmp_path / "step-300").mkdir()
    for step in (100, 150, 200, 300):
        with pytest.raises(ValueError, match=rf"step-{step} exists; .*: to save step {step}, delete it"):
            folders.begin(tmp_path, step)
    (tmp_path / folders.LATEST).unlink()
    with pytest.raises(ValueError, match="step-200 exists"):
        folders.begin(tmp_path, 200)
    save(tmp_path, 250)
    for step in (100, 150, 200, 250):
        assert folders.check_files(folders.step_folder(tmp_path, step), 0, 1, contents=True) == []
    assert latest_step(tmp_path) == 250


def test_a_checkpoint_whose_pointer_was_not_moved_is_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def deadly(source: Path, target: Path) -> None:
        if source.name == folders.NEXT or source.name.endswith(".partial"):
            raise Killed
        replace(source, target)

    save(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", deadly)
        with pytest.raises(Killed):
            save(tmp_path, 2)
    assert folders.read_json(tmp_path / folders.LATEST) == {"step": 1}
    check(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", deadly)
        with pytest.raises(Killed):
            save(tmp_path, 3)
    check(tmp_path, 2)
    save(tmp_path, 3)
    check(tmp_path, 3)
    assert folders.check_files(folders.step_folder(tmp_path, 2), 0, 1, contents=True) == []
    # What the pointer was to name, and is not there, is no checkpoint.
    folders.write_json(tmp_path / folders.NEXT, {"step": 4})
    assert latest_step(tmp_path) == 3


def test_a_writer_that_outlives_its_run_cannot_reach_the_next_save(tmp_path: Path) -> None:
    stale = folders.begin(tmp_path, 2)
    release_all()
    assert folders.begin(tmp_path, 2) != stale
    release_all()
    with pytest.raises(FileNotFoundError):
        (stale / "__0_0.distcp").write_bytes(b"late")


def begin_in_another_process(root: Path, step: int, connection: Connection) -> None:
    folder = folders.begin(root, step)
    connection.send(folder)
    connection.recv()
    write(folder, step)
    folders.commit(folder, step)


def test_two_saves_into_one_root_both_become_complete(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("fork")
    here, there = processes.Pipe()
    other = processes.Process(target=begin_in_another_process, args=(tmp_path, 2, there))
    other.start()
    partial = here.recv()
    save(tmp_path, 1)
    assert partial.is_dir()
    here.send("go on")
    other.join()
    assert other.exitcode == 0
    check(tmp_path, 2)
    assert folders.check_files(folders.step_folder(tmp_path, 1), 0, 1, contents=True) == []
    # The lock ends with its process.
    other = processes.Process(target=begin_in_another_process, args=(tmp_path, 3, there))
    other.start()
    partial = here.recv()
    other.kill()
    other.join()
    save(tmp_path, 4)
    assert not partial.exists()


def test_the_second_save_of_a_step_is_refused(tmp_path: Path) -> None:
    late = folders.begin(tmp_path, 2)
    write(late, 2)
    save(tmp_path, 2)
    with pytest.raises(ValueError, match="step-2 exists; a complete checkpoint is never written over"):
        folders.commit(late, 2)
    check(tmp_path, 2)
    save(tmp_path, 3)
    assert not late.exists()


@pytest.mark.parametrize("text", ["[1]", '{"step": null}', "{}"])
def test_a_damaged_pointer_or_manifest_is_named(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1)
    (tmp_path / folders.LATEST).write_text(text)
    with pytest.raises(ValueError, match=r"latest\.json is corrupt"):
        latest_step(tmp_path)
    (tmp_path / "step-1" / folders.MANIFEST).write_text(text)
    assert "corrupt" in " ".join(folders.check_files(tmp_path / "step-1", 0, 1, contents=True)) or text == "{}"


def test_parts_cover_every_file_once(tmp_path: Path) -> None:
    save(tmp_path, 4)
    folder = folders.step_folder(tmp_path, 4)
    parts = [folders.describe_files(folder, part, 3) for part in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(folders.describe_files(folder, 0, 1))
    (folder / "__1_0.distcp").write_bytes(b"x")
    assert sum(len(folders.check_files(folder, part, 3, contents=True)) for part in range(3)) == 1
    (folder / folders.MANIFEST).unlink()
    assert "is not a complete checkpoint" in folders.check_files(folder, 0, 1, contents=True)[0]


def test_an_empty_folder_has_no_latest(tmp_path: Path) -> None:
    assert latest_step(tmp_path / "nothing") is None


def test_a_converted_run_is_found_and_weights_alone_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    with pytest.raises(ValueError, match="iter_0000007 is not a folder; there is no checkpoint of step 7"):
        folders.find(tmp_path, None)
    (tmp_path / "iter_0000007").mkdir()
    assert folders.find(tmp_path, None) == folders.find(tmp_path, 7) == (7, tmp_path / "iter_0000007")
    state = folders.read_state(tmp_path / "iter_0000007", 7)
    assert (state["distributed"], state["schedule"], state["optimizer"]["step"]) == (
        True,
        {"steps": 7, "skipped": 0},
        7,
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(ValueError, match="is a 'release' with weights alone; load them with rl-ckpt's load_hf"):
        folders.find(tmp_path, None)
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"latest_checkpointed_iteration.txt names '\\\\xff', which is no step; write"):
        folders.find(tmp_path, None)
