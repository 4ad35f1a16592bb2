"""A run's folder of checkpoints: which are complete, which is the latest, which are to go."""

import os
import re
import shutil
from pathlib import Path

from ckpt.files.atomic import remove_abandoned, sync_folder
from ckpt.files.contents import STATE

LATEST = "latest"


def point_to(root: Path, name: str) -> None:
    """Let `latest` name a checkpoint, in one step."""
    temporary = root / f".{LATEST}.saving"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(f"{name}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, root / LATEST)
    sync_folder(root)


def saved_steps(root: str | os.PathLike[str]) -> list[int]:
    """The steps whose checkpoints are complete, oldest first."""
    found = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in Path(root).glob("step-*"))
    return sorted(int(match[1]) for match in found if match and (Path(root) / match[0] / STATE).is_file())


def latest_step(root: str | os.PathLike[str]) -> int | None:
    """The step that `latest` names; None where nothing has been saved.

    Raises:
        ValueError: the pointer is damaged, or names a checkpoint that is not there.
    """
    pointer = Path(root) / LATEST
    if not pointer.is_file():
        return None
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    match = re.fullmatch(r"step-(\d{8,})", name)
    if match is None or not (Path(root) / name / STATE).is_file():
        raise ValueError(f"{pointer} names {name!r}, which is no checkpoint; there are steps {saved_steps(root)}")
    return int(match[1])


def remove_leftovers(root: Path) -> None:
    """Remove what killed saves of any step have left, unless a living one is at work there."""
    remove_abandoned(root.glob(".step-*.saving-*"))


def prune(root: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints; never the one that `latest` names.

    Each disappears in one step first: a kill in the middle leaves a leftover, and never half a checkpoint.
    """
    for step in [] if keep is None else saved_steps(root)[:-keep]:
        if step != latest_step(root):
            gone = root / f".step-{step:08d}.saving-{os.getpid()}-pruned"
            os.rename(root / f"step-{step:08d}", gone)
            shutil.rmtree(gone, ignore_errors=True)
