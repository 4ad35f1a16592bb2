"""A disk that is full at any call of any save: an error that says where and how much, and what was there stays."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

import ckpt.files.atomic
import ckpt.transfer.save
from ckpt import Grid, Place, layout_for, load_hf, load_training, merge, reshard, save_hf, save_training
from ckpt.files.disk import replacing, room_for
from ckpt.training.runs import saved_steps

Checkpoints = Callable[..., Path]
Saves = Callable[[Path, Path, int], Callable[[], Any]]


def filled(source: Path, version: int, place: Place | None = None) -> dict[str, Tensor]:
    """A model whose every element is the version."""
    tensors = load_hf(source, layout_for(source), place)
    return {name: torch.full_like(tensor, version) for name, tensor in tensors.items()}


# Each kind of save: from what is ready before the disk is full, the save itself.


def save_to_hf(source: Path, folder: Path, version: int) -> Callable[[], Any]:
    layout, tensors = layout_for(source), filled(source, version)
    options: dict[str, Any] = {"max_shard_size": "40KB", "copy_from": source}
    return lambda: save_hf(folder / "saved", tensors, layout, **options)


def save_run(source: Path, folder: Path, version: int) -> Callable[[], Any]:
    layout, tensors = layout_for(source), filled(source, version)
    return lambda: save_training(folder / "saved", version, tensors, layout)


def reshard_to(source: Path, folder: Path, version: int) -> Callable[[], Any]:
    whole = folder / f"hf{version}"
    save_hf(whole, filled(source, version), layout_for(source))
    return lambda: reshard(whole, folder / "saved", Grid(pp=2))


def merge_to(source: Path, folder: Path, version: int) -> Callable[[], Any]:
    reshard_to(source, folder / f"shards{version}", version)()
    return lambda: merge(folder / f"shards{version}" / "saved", folder / "saved", max_shard_size="40KB")


def version_of(kind: Saves, saved: Path) -> int:
    """The one version that a complete checkpoint holds."""
    if kind is save_run:
        layout = layout_for(saved / "step-00000001")
        held = {step: load_training(saved, layout, step=step).tensors for step in saved_steps(saved)}
        for step, tensors in held.items():
            # Whether `latest` names it or not.
            assert all(tensor.eq(step).all() for tensor in tensors.values())
        return load_training(saved, layout).step
    tensors = load_hf(saved, layout_for(saved), check=kind is save_to_hf)
    found = {int(value) for tensor in tensors.values() for value in tensor.unique()}
    assert len(found) == 1, found
    return found.pop()


class Disk:
    """Puts a call that fails in another's place: from one of its calls on, or at that one alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, at: int, *, once: bool) -> None:
        self.calls = 0
        real = getattr(where, name)

        def full(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == at + 1 if once else self.calls > at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        monkeypatch.setattr(where, name, full)


def no_such_call(*_: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def fill(monkeypatch: pytest.MonkeyPatch, failing: str, at: int) -> Disk:
    if failing == "ftruncate":
        # What gives a file its size where the file system cannot reserve blocks.
        monkeypatch.setattr(os, "posix_fallocate", no_such_call)
    if failing == "rename":
        monkeypatch.setattr(ckpt.files.atomic, "_exchange", lambda a, b: False)
    # A disk that is full may take a name back to where it was.
    once = failing in ("rename", "_exchange")
    return Disk(monkeypatch, ckpt.files.atomic if failing == "_exchange" else os, failing, at, once=once)


EVERYWHERE = ["posix_fallocate", "ftruncate", "pwrite", "pwritev", "fsync", "rename"]
REPLACING = [save_to_hf, reshard_to, merge_to]
# Resharding and merging write by the calls of every save; here are those that resharding orders otherwise.
OWN = [(reshard_to, "pwritev"), (reshard_to, "_exchange")]
CASES: list[Any] = [
    pytest.param(kind, failing, marks=() if kind is save_to_hf or (kind, failing) in OWN else pytest.mark.slow)
    for kind in REPLACING
    for failing in (*EVERYWHERE, "_exchange")
]
# A new step replaces no folder, only the pointer to the latest; its files are written as those of every save.
CASES += [
    pytest.param(save_run, failing, marks=pytest.mark.slow if failing in EVERYWHERE[:4] else ())
    for failing in (*EVERYWHERE, "replace")
]


def fails_for_want_of_room(save: Callable[[], Any], place: Path, needed: int) -> bool:
    """Whether a save fails; if so, it says where the disk is full and how much it needs."""
    try:
        save()
    except OSError as error:
        check_message(str(error), place, needed)
        return True
    return False


def check_message(text: str, place: Path, needed: int) -> None:
    """Beside the tensors there are headers, configurations and states of generators."""
    found = re.search(r"the disk of (.*) is full: the save needs ([\d,]+) bytes, [\d,]+ are free", text)
    assert found, text
    assert Path(found[1]) == place
    assert needed <= int(found[2].replace(",", "")) < 1.5 * needed


def bytes_of(source: Path) -> int:
    return sum(tensor.nbytes for tensor in filled(source, 1).values())


@pytest.mark.parametrize(("kind", "failing"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_each_call_that_finds_the_disk_full(
    kind: Saves, failing: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, saved = checkpoint("llama"), tmp_path / "saved"
    kind(source, tmp_path, 1)()
    save = kind(source, tmp_path, 2)
    names = sorted(entry.name for entry in tmp_path.iterdir())
    versions = []
    for number in range(100):
        with monkeypatch.context() as patch:
            disk = fill(patch, failing, number)
            failed = fails_for_want_of_room(save, saved, bytes_of(source))
        # It succeeds when it makes fewer calls, and only then.
        assert failed == (disk.calls > number)
        versions.append(version_of(kind, saved))
        assert sorted(entry.name for entry in tmp_path.iterdir()) == names
        assert not list(saved.glob(".step-*"))
        if not failed:
            break
    assert len(versions) > 1
    assert versions.pop() == 2
    if kind is save_run and failing == "fsync":
        # The pointer moves to a checkpoint that is complete; last of all its own folder is synced.
        assert versions.pop() == 2
    assert set(versions) == {1}


@pytest.mark.parametrize("failing", ["rename", "fsync"])
def test_where_nothing_was_there_nothing_is_left(
    failing: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("llama")
    save = save_to_hf(source, tmp_path, 1)
    for number in range(100):
        with monkeypatch.context() as patch:
            disk = fill(patch, failing, number)
            failed = fails_for_want_of_room(save, tmp_path / "saved", bytes_of(source))
        assert failed == (disk.calls > number)
        if not failed:
            break
        assert list(tmp_path.iterdir()) == []
    assert number >= 1
    assert version_of(save_to_hf, tmp_path / "saved") == 1


def test_a_disk_that_fills_while_old_checkpoints_are_pruned(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is complete and the latest by then."""
    source = checkpoint("llama")
    layout = layout_for(source)
    for step in (1, 2):
        save_training(tmp_path, step, filled(source, step), layout)
    with monkeypatch.context() as patch:
        fill(patch, "rename", 1)
        with pytest.raises(OSError, match=r"is full: the save needs"):
            save_training(tmp_path, 3, filled(source, 3), layout, keep=1)
    assert saved_steps(tmp_path) == [1, 2, 3]
    assert load_training(tmp_path, layout).step == 3
    save_training(tmp_path, 4, filled(source, 4), layout, keep=1)
    assert saved_steps(tmp_path) == [4]


def save_on_two(group: Any, source: Path, folder: Path, kind: str, failing: str) -> str:
    """Rank 1's disk is full, or rank 0's for what rank 0 alone does; far from the folder rank 1 sends its part."""
    layout, place = layout_for(source), Place(tp=(group.rank(), 2))
    tensors = filled(source, 2, place)
    patch = pytest.MonkeyPatch()
    if group.rank() == (1 if failing == "pwritev" and kind != "hf from afar" else 0):
        fill(patch, failing, 0)
    if kind == "hf from afar":
        patch.setattr(ckpt.transfer.save, "reaching_ranks", lambda *_: [0])
    try:
        if kind.startswith("hf"):
            save_hf(folder / "saved", tensors, layout, place, group=group)
        else:
            save_training(folder / "saved", 2, tensors, layout, place, group=group)
    except OSError as error:
        return str(error)
    finally:
        patch.undo()
    return "saved"


@pytest.mark.parametrize("failing", ["posix_fallocate", "pwritev", "fsync", "rename"])
@pytest.mark.parametrize("kind", ["hf", "hf from afar", "training"])
def test_one_ranks_full_disk_is_the_same_error_on_all(
    kind: str, failing: str, checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    source = checkpoint("llama")
    place = tmp_path / "saved"
    for text in ranks.run(save_on_two, source, tmp_path, kind, failing, world=2, timeout=60):
        check_message(text, place, bytes_of(source))
    assert list((place if kind == "training" else tmp_path).iterdir()) == []


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EDQUOT, "the disk of PATH is full: the save needs 5 bytes, "),
        (errno.EFBIG, "a file at PATH would be larger than its file system allows; raise the limit, or save elsewhere"),
        (errno.EROFS, "PATH lies on a file system that is mounted read-only; mount it for writing, or save elsewhere"),
        (errno.EACCES, "PATH is closed to this user; give the user the right to write there, or save elsewhere"),
        (errno.EPERM, "PATH is closed to this user; give the user the right to write there, or save elsewhere"),
        (errno.EIO, "the disk of PATH does not work; look at the messages of the kernel, and save elsewhere"),
    ],
)
def test_why_a_disk_refuses_a_write(number: int, message: str, tmp_path: Path) -> None:
    path, text = tmp_path / "saved", os.strerror(number)
    for error in (
        OSError(number, text, "a temporary file"),
        SafetensorError(f"Error while serializing: I/O error: {text} (os error {number})"),
    ):
        with pytest.raises(OSError, match=re.escape(message.replace("PATH", str(path)))) as raised, room_for(5, path):
            raise error
        assert raised.value.errno is None


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "x"), ValueError("(os error 28)"), KeyError(28)])
def test_other_errors_pass(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised, room_for(5, tmp_path):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("kind", [save_to_hf, save_run, reshard_to, merge_to])
def test_a_limit_on_the_size_of_files_is_named_and_nothing_is_left(
    kind: Saves, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    save = kind(checkpoint("llama"), tmp_path, 1)
    before = sorted(tmp_path.rglob("*"))
    with (
        file_limit(9000),
        pytest.raises(OSError, match=rf"a file at {tmp_path}/saved would be .* 9,000 bytes \(`ulimit"),
    ):
        save()
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and path != tmp_path / "saved"] == []


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_is_replaced_as_a_whole_by_any_number_of_writers(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_text("old")
    with replacing(path) as first, replacing(path) as second:
        first.write(b"1")
        second.write(b"2")
        assert path.read_text() == "old"
    assert path.read_text() == "1"
    with pytest.raises(ZeroDivisionError), replacing(path) as third:
        third.write(b"%d" % (1 // 0))
    assert path.read_text() == "1"
    assert list(tmp_path.iterdir()) == [path]
