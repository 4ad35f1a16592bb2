"""A folder of checkpoints: what is complete, what is the latest, and how one becomes complete in a single step.

checkpoints/
  latest.json          {"step": 200}, replaced atomically, only after step-200 is complete
  .next.json           what will replace it; counts as soon as the folder that it names has that name
  step-100/            Megatron's files, state.json, manifest.json (name, bytes, CRC-32 of every other file)
  step-200/
  .step-300.91c2e0f4.partial/   being written, or left by a run that was killed; the next save removes it
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from pathlib import Path
from typing import Any

MANIFEST, STATE, LATEST, NEXT = "manifest.json", "state.json", "latest.json", ".next.json"
_BLOCK = 1 << 22


def step_folder(root: Path, step: int) -> Path:
    """Where a complete checkpoint lies."""
    return root / f"step-{step}"


def latest_step(root: str | Path) -> int | None:
    """The step of the newest complete checkpoint in a folder; None when there is none."""
    root = Path(root)
    # A run that was killed right after a folder got its name has left the pointer to it unmoved.
    following = _step_in(root / NEXT)
    if following is not None and step_folder(root, following).is_dir():
        return following
    return _step_in(root / LATEST)


def _step_in(pointer: Path) -> int | None:
    try:
        return int(read_json(pointer)["step"])
    except FileNotFoundError:
        return None


def find(root: Path, step: int | None) -> tuple[int, Path]:
    """A checkpoint's step and folder; without a step the latest's.

    Raises:
        ValueError: there is none.
    """
    step = latest_step(root) if step is None else step
    if step is None:
        raise ValueError(f"{root} holds no complete checkpoint ({LATEST} is missing)")
    folder = step_folder(root, step)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; there is no complete checkpoint of step {step}")
    return step, folder


def begin(root: Path, step: int) -> Path:
    """Remove what killed saves have left, no complete checkpoint among it, and make the folder to write into.

    Its name is new each time: a writing process that outlives a killed run finds its own folder gone, not this one.

    Raises:
        ValueError: a checkpoint of that step exists, also where the run has gone back to one before it.
    """
    if (target := step_folder(root, step)).exists():
        raise ValueError(
            f"{target} exists; a complete checkpoint is never written over: to save step {step}, delete it"
        )
    root.mkdir(parents=True, exist_ok=True)
    if (following := _step_in(root / NEXT)) is not None and following == latest_step(root):
        _move_pointer(root)
    for leftover in root.glob(".step-*.partial"):
        shutil.rmtree(leftover)
    folder = root / f".step-{step}.{secrets.token_hex(4)}.partial"
    folder.mkdir()
    return folder


def commit(folder: Path, step: int) -> None:
    """Make a written checkpoint the latest, in the moment of one rename; each of the three steps is made durable."""
    root = folder.parent
    write_json(root / NEXT, {"step": step})
    os.rename(folder, step_folder(root, step))
    sync_folder(root)
    _move_pointer(root)


def _move_pointer(root: Path) -> None:
    os.replace(root / NEXT, root / LATEST)
    sync_folder(root)


def read_json(path: Path) -> Any:
    """Read a JSON file; raises ValueError, with its name, for one that is damaged."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader finds the old or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_files(folder: Path, part: int, parts: int) -> dict[str, tuple[int, int]]:
    """(bytes, CRC-32) of every `parts`-th file from number `part` on, by name."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    return {path.name: (path.stat().st_size, _crc32(path)) for path in files[part::parts]}


def check_files(folder: Path, part: int, parts: int, *, contents: bool) -> list[str]:
    """What is wrong with this part of a checkpoint's files; nothing when it is whole.

    Args:
        folder: of a complete checkpoint.
        part, parts: check every `parts`-th file from number `part` on.
        contents: compare checksums, which reads every file, and not only sizes.
    """
    path = folder / MANIFEST
    if not path.exists():
        return [f"{path} is missing; {folder} is not a complete checkpoint"]
    try:
        listed = sorted(read_json(path).items())
    except ValueError as error:
        return [str(error)]
    wrong = []
    for name, (size, crc) in listed[part::parts]:
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
