"""A folder of checkpoints: find the complete checkpoints and the latest, and complete a save.

checkpoints/
  latest.json          {"step": 200}, replaced atomically once step-200 is complete
  .next.json           the next latest.json; counts as soon as the folder that it names exists
  step-100/            Megatron's files, state.json, manifest.json (name, bytes, CRC-32 of every other file)
  step-200/
  .step-300.91c2e0f4.partial/   a save under way, or the remains of a killed save, which the next save removes

The process that writes a partial folder holds a lock on it, so a save never removes the folder of another living save.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST, STATE, LATEST, NEXT = "manifest.json", "state.json", "latest.json", ".next.json"
TRACKER = "latest_checkpointed_iteration.txt"
_BLOCK = 1 << 22
# Partial folders that this process writes, and the open descriptor that holds the lock of each.
_locks: dict[Path, int] = {}


def step_folder(root: Path, step: int) -> Path:
    """Return the path of a complete checkpoint."""
    return root / f"step-{step}"


def latest_step(root: str | Path) -> int | None:
    """Return the step of the newest complete checkpoint in a folder, or None if there is none."""
    root = Path(root)
    # A run that is killed after the rename of a folder has not yet moved the pointer to it.
    following = _step_in(root / NEXT)
    if following is not None and step_folder(root, following).is_dir():
        return following
    return _step_in(root / LATEST)


def _step_in(pointer: Path) -> int | None:
    try:
        return int(read_json(pointer)["step"])
    except FileNotFoundError:
        return None
    except (KeyError, TypeError) as error:
        raise ValueError(f'{pointer} is corrupt: it is not {{"step": N}}') from error


def find(root: Path, step: int | None) -> tuple[int, Path]:
    """Return the step and the folder of a checkpoint; by default of the latest.

    Raises:
        ValueError: There is no such checkpoint.
    """
    if (root / TRACKER).is_file():
        return _find_converted(root, step)
    step = latest_step(root) if step is None else step
    if step is None:
        raise ValueError(f"{root} holds no complete checkpoint ({LATEST} is missing)")
    folder = step_folder(root, step)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; there is no complete checkpoint of step {step}")
    return step, folder


def _find_converted(root: Path, step: int | None) -> tuple[int, Path]:
    """Return the step and the folder of a run that `ckpt convert --to megatron` has made of a training run."""
    # Bytes that are no text are shown in the error.
    latest = (root / TRACKER).read_bytes().decode("utf-8", "backslashreplace").strip()
    if step is None and latest == "release":
        raise ValueError(f"{root} is a 'release' with weights alone; load them with rl-ckpt's load_hf")
    if step is None and not latest.isdecimal():
        raise ValueError(f"{root / TRACKER} names {latest!r}, which is no step; write the number of a step into it")
    step = int(latest) if step is None else step
    folder = root / f"iter_{step:07d}"
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; there is no checkpoint of step {step}")
    return step, folder


def read_state(folder: Path, step: int) -> dict[str, Any]:
    """Return state.json; a converted run has none, and holds the state of a distributed optimizer at this step."""
    if not (folder.parent / TRACKER).exists():
        return dict(read_json(folder / STATE))
    counts = {"schedule": {"steps": step, "skipped": 0}, "optimizer": {"step": step, "grad_scaler": None}}
    return {"distributed": True, "dims": None, "extra": {}, **counts}


def begin(root: Path, step: int) -> Path:
    """Make and lock the folder that a save writes into; remove the partial folders of killed saves.

    Call `release` after an error; `commit` releases the lock itself.

    Raises:
        ValueError: A complete checkpoint of this step exists.
    """
    _refuse_existing(root, step)
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        if (following := _step_in(root / NEXT)) is not None and following == latest_step(root):
            _move_pointer(root)
        for leftover in root.glob(".step-*.partial"):
            if not _is_in_use(leftover):
                shutil.rmtree(leftover)
        # A random name: a writing process that outlives its killed run must not write into this folder.
        folder = root / f".step-{step}.{secrets.token_hex(4)}.partial"
        folder.mkdir()
        _locks[folder] = _open(folder)
        # Without locks (some network file systems) no folder counts as abandoned.
        with contextlib.suppress(OSError):
            fcntl.flock(_locks[folder], fcntl.LOCK_EX)
    return folder


def release(folder: Path) -> None:
    """Give up the lock of a partial folder, so that the next save removes the folder."""
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


@contextlib.contextmanager
def released_after_error(folder: Path) -> Iterator[None]:
    """Release a partial folder if the block raises."""
    try:
        yield
    except BaseException:
        release(folder)
        raise


def commit(folder: Path, step: int) -> None:
    """Make a written checkpoint the latest, by one rename; sync each of the three changes to the disk.

    Raises:
        ValueError: Another save has completed the same step in the meantime.
    """
    root = folder.parent
    with released_after_error(folder), _locked(root):
        _refuse_existing(root, step)
        write_json(root / NEXT, {"step": step})
        os.rename(folder, step_folder(root, step))
        sync_folder(root)
        _move_pointer(root)
    release(folder)


def _refuse_existing(root: Path, step: int) -> None:
    if (target := step_folder(root, step)).exists():
        raise ValueError(
            f"{target} exists; a complete checkpoint is never written over: to save step {step}, delete it"
        )


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _is_in_use(folder: Path) -> bool:
    """Return whether a living process holds the lock of a partial folder."""
    lock = _open(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Keep other saves from moving the pointers of `root` meanwhile."""
    lock = _open(root)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _move_pointer(root: Path) -> None:
    os.replace(root / NEXT, root / LATEST)
    sync_folder(root)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: The file is damaged; the error names the file.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: a reader finds the old file or the whole new file."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk."""
    descriptor = _open(folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_files(folder: Path, rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """Return (bytes, CRC-32) by name, of every `world_size`-th file from number `rank` on."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    return {path.name: (path.stat().st_size, _crc32(path)) for path in files[rank::world_size]}


def check_files(folder: Path, rank: int, world_size: int, *, contents: bool) -> list[str]:
    """Compare files of a checkpoint with its manifest; return one sentence for each difference.

    Args:
        folder: The folder of a complete checkpoint.
        rank, world_size: Check every `world_size`-th file from number `rank` on.
        contents: Compare checksums, which reads every file; False compares sizes only.
    """
    path = folder / MANIFEST
    if (folder.parent / TRACKER).exists():
        return []  # a converted run has no manifest
    if not path.exists():
        return [f"{path} is missing; {folder} is not a complete checkpoint"]
    try:
        listed = sorted((name, size, crc) for name, (size, crc) in read_json(path).items())
    except ValueError as error:
        return [str(error)]
    except (AttributeError, TypeError):
        return [f"{path} is corrupt: it is not a table of sizes and checksums by name"]
    wrong = []
    for name, size, crc in listed[rank::world_size]:
        file = folder / name
        if not file.exists():
            wrong.append(f"{file} is missing")
        elif file.stat().st_size != size:
            wrong.append(f"{file} has {file.stat().st_size} bytes, not {size}")
        elif contents and _crc32(file) != crc:
            wrong.append(f"{file} is corrupt: its checksum is not the recorded one")
    return wrong


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
