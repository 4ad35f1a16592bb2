"""A save that is killed, or runs out of disk, leaves the checkpoint that was there."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt.files.atomic
from ckpt import Place, layout_for, load_hf, save_hf
from ckpt.files.atomic import FolderWriter, remove_abandoned

Checkpoints = Callable[..., Path]


def save_version(source: str, target: str, version: int, group: Any = None) -> None:
    """Save a model whose every element is the version."""
    layout = layout_for(source)
    place = Place() if group is None else Place(tp=(group.rank(), 2))
    tensors = {name: torch.full_like(tensor, version) for name, tensor in load_hf(source, layout, place).items()}
    save_hf(target, tensors, layout, place, group=group, max_shard_size="20KB")


def version_of(target: str) -> int:
    """The one version that a complete checkpoint holds."""
    found = {int(value) for tensor in load_hf(target, layout_for(target)).values() for value in tensor.unique()}
    assert len(found) == 1, found
    return found.pop()


def save_for_ever(rank: int, source: str, target: str, store: str, started: int) -> None:
    parent = os.getppid()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    version = version_of(target)
    os.write(started, b"x")
    while os.getppid() == parent:
        version += 1
        save_version(source, target, version, dist.group.WORLD)
    os._exit(1)  # nobody is left to kill it


def kill_at_random_moments(source: str, target: str, rounds: int) -> None:
    """Each attempt forks two ranks that save one version after another, and kills both some time into it; attempts go
    on until as many kills as `rounds` have fallen into a save and left its unfinished folder."""
    chance = random.Random(0)
    folder = Path(target).parent
    save_version(source, target, 1)
    attempts = inside = 0
    left: set[Path] = set()
    while inside < rounds:
        attempts += 1
        assert attempts <= 10 * rounds, f"{inside} of {attempts - 1} kills fell into a save"
        before = version_of(target)
        reading, writing = os.pipe()
        ranks = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                save_for_ever(rank, source, target, str(folder / f"store{attempts}"), writing)
            ranks.append(child)
        for _ in ranks:
            assert os.read(reading, 1) == b"x"
        time.sleep(chance.uniform(0, 0.15))
        for child in chance.sample(ranks, 2):
            os.kill(child, signal.SIGKILL)
        for child in ranks:
            os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        version = version_of(target)
        assert version >= before
        # The save that was killed leaves at most its own folder: it removed what the one before it left.
        found = set(folder.glob(".saved.saving-*"))
        assert len(found) <= 1
        assert version == before or not found & left
        inside += bool(found - left)
        left = found
    assert left
    save_version(source, target, 1000)
    assert version_of(target) == 1000
    assert not list(folder.glob(".saved*"))
    print(f"{inside} of {attempts} kills left a temporary folder")


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments_leaves_a_complete_checkpoint(
    rounds: int, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    # In a process of its own, which forks its ranks: they start in milliseconds, and pytest's threads are not forked.
    done = subprocess.run(
        [sys.executable, __file__, str(checkpoint("llama")), str(tmp_path / "saved"), str(rounds)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{rounds} of "), done.stdout


@pytest.mark.slow  # test_disk.py has each call of a save find the disk full
@pytest.mark.parametrize("failing", ["posix_fallocate", "pwritev", "fsync"])
@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_full_disk_is_a_clear_error_and_the_old_checkpoint_stays(
    failing: str, call: int, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = str(checkpoint("llama")), str(tmp_path / "saved")
    save_version(source, target, 1)
    calls = 0
    real = getattr(os, failing)

    def full(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(OSError, match=r"No space left|is full: the save needs [\d,]+ bytes, [\d,]+ are free"):
            save_version(source, target, 2)
    assert version_of(target) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def fill_disk(group: Any, source: str, target: str) -> str:
    """Rank 1 finds its disk full in the middle of its writes."""
    real = os.pwritev
    if group.rank() == 1:

        def full(*args: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.pwritev = full
    try:
        save_version(source, target, 2, group)
    except OSError as error:
        return str(error)
    finally:
        os.pwritev = real
    return "saved"


@pytest.mark.slow
def test_a_full_disk_on_one_rank_is_an_error_on_all(checkpoint: Checkpoints, tmp_path: Path, ranks: Any) -> None:
    source, target = str(checkpoint("llama")), str(tmp_path / "saved")
    save_version(source, target, 1)
    seen = ranks.run(fill_disk, source, target, world=2, timeout=10)
    assert all("No space left on device" in text for text in seen)
    assert all(f"the disk of {tmp_path} is full: the save needs" in text for text in seen)
    assert version_of(target) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def write(target: Path, text: str) -> None:
    with FolderWriter(target) as folder:
        (folder / "config.json").write_text(text)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_with_or_without_the_exchange_call(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(ckpt.files.atomic, "_exchange", lambda a, b: False)
    for text in ("1", "2", "3"):
        write(tmp_path / "x", text)
        assert (tmp_path / "x" / "config.json").read_text() == text
        assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("there", [None, "empty", "checkpoint", "another save", "file"])
def test_what_somebody_puts_into_the_target_during_a_save_is_kept_and_named(
    there: str | None, exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(ckpt.files.atomic, "_exchange", lambda a, b: False)
    target = tmp_path / "x"
    if there in ("checkpoint", "another save"):
        write(target, "1")
    elif there == "empty":
        target.mkdir()
    writer = FolderWriter(target)
    (writer.path / "config.json").write_text("2")
    if there == "another save":
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", no_locks)
            write(target, "3")
    if there == "file":
        target.write_text("mine")
    else:
        target.mkdir(exist_ok=True)
        (target / "thesis.txt").write_text("mine")
        if there != "another save":
            (target / "tokenizer.json").write_text("mine")
        (target / "eval").mkdir()
        (target / "eval" / "config.json").write_text("mine")
    with pytest.warns(RuntimeWarning, match=rf"x held .*, which .* is kept in {tmp_path}/x\.kept-"):
        writer.commit()
    assert (target / "config.json").read_text() == "2"
    (kept,) = tmp_path.glob("x.kept-*")
    found = {str(file.relative_to(kept)): file.read_text() for file in kept.rglob("*") if file.is_file()}
    if there == "file":
        assert kept.read_text() == "mine"
    else:
        names = {"thesis.txt", "eval/config.json", *({"tokenizer.json"} if there in ("empty", "checkpoint") else ())}
        assert found == dict.fromkeys(names, "mine")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x", kept.name]
    write(target, "4")
    assert kept.exists()


def test_what_somebody_put_into_a_folder_that_a_killed_save_left_is_kept(tmp_path: Path) -> None:
    for left in (".x.saving-1-a", ".x.previous"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "config.json").write_text("old")
        (tmp_path / left / "thesis.txt").write_text(left)
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.warns(RuntimeWarning, match=r"x held \['thesis.txt'\]"):
            write(tmp_path / "x", "1")
    assert {file.read_text() for file in tmp_path.glob("x.kept-*/*")} == {".x.saving-1-a", ".x.previous"}
    assert not list(tmp_path.glob(".x*"))


def modes(folder: Path) -> dict[str, str]:
    return {entry.name: oct(entry.stat().st_mode & 0o7777) for entry in (folder, *folder.iterdir())}


@pytest.mark.parametrize("exchange", [True, False])
def test_a_save_keeps_the_modes_of_its_target(
    exchange: bool, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(ckpt.files.atomic, "_exchange", lambda a, b: False)
    source, target = str(checkpoint("llama")), tmp_path / "saved"
    before = os.umask(0o002)
    try:
        save_version(source, str(target), 1)
        # A new folder has the modes that the umask leaves.
        assert set(modes(target).values()) == {"0o775", "0o664"}
        for file in target.iterdir():
            file.chmod(0o600)
        (target / "config.json").chmod(0o640)
        target.chmod(0o2700)
        private = modes(target)
        with FolderWriter(target) as folder:
            assert modes(folder) == {folder.name: "0o700"}
            (folder / "config.json").write_text("{}")
            (folder / "model.safetensors").write_text("")
        assert modes(target) == {"saved": "0o2700", "config.json": "0o640", "model.safetensors": "0o640"}
        save_version(source, str(target), 2)
    finally:
        os.umask(before)
    assert modes(target).keys() == private.keys()
    assert set(modes(target).values()) == {"0o2700", "0o640"}


def test_a_kill_between_two_renames_is_mended_by_the_next_save(tmp_path: Path) -> None:
    """Without the exchange call there is an instant in which only the previous folder is there: it is named and
    kept."""
    write(tmp_path / "x", "1")
    (tmp_path / "x").rename(tmp_path / ".x.previous")
    with pytest.raises(ValueError, match=r"does not exist.*last complete checkpoint in .*\.x\.previous"):
        load_hf(tmp_path / "x", layout_for({"architectures": ["LlamaForCausalLM"], **SIZES}))
    with pytest.raises(RuntimeError), FolderWriter(tmp_path / "x"):
        raise RuntimeError("a save that fails")
    assert (tmp_path / "x" / "config.json").read_text() == "1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


SIZES = {
    "hidden_size": 8,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "vocab_size": 8,
}


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("locks", [True, False])
def test_a_folder_is_saved_to_by_one_process_at_a_time(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system has no locks, the last save wins, and the first stays whole until its end."""
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    first = FolderWriter(tmp_path / "x")
    (first.path / "config.json").write_text("1")
    if locks:
        message = rf"process {os.getpid()} of .* saves to {tmp_path}/x; wait until it ends, or choose another path"
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "x", "2")
    remove_abandoned(tmp_path.glob(".x.saving-*"))
    first.commit()
    assert (tmp_path / "x" / "config.json").read_text() == "1"
    write(tmp_path / "x", "2")
    assert (tmp_path / "x" / "config.json").read_text() == "2"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_save_left_is_removed_with_its_lock(tmp_path: Path) -> None:
    program = "import sys, time; from pathlib import Path; from ckpt.files.atomic import FolderWriter\n"
    program += "with FolderWriter(Path(sys.argv[1])) as folder: (folder / 'config.json').touch(); time.sleep(60)"
    killed = subprocess.Popen([sys.executable, "-c", program, tmp_path / "x"])
    while not list(tmp_path.glob(".x.saving-*/config.json")):
        time.sleep(0.01)
    left = sorted(entry.name for entry in tmp_path.iterdir())
    remove_abandoned(tmp_path.glob(".x.saving-*"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == left
    killed.kill()
    killed.wait()
    remove_abandoned(tmp_path.glob(".x.saving-*"))
    assert list(tmp_path.iterdir()) == []


def test_a_name_with_wildcards_removes_only_its_own_leftovers(tmp_path: Path) -> None:
    (tmp_path / ".ab.saving-1").mkdir()
    (tmp_path / ".[ab]*.saving-1").mkdir()
    write(tmp_path / "[ab]*", "1")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".ab.saving-1", "[ab]*"]


if __name__ == "__main__":
    kill_at_random_moments(sys.argv[1], sys.argv[2], int(sys.argv[3]))
