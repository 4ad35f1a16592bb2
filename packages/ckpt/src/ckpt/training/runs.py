"""Find the complete and the latest checkpoints in a run's folder, and remove old ones."""

import os
import re
from pathlib import Path

from ckpt.files.atomic import remove_checkpoint, take_mode
from ckpt.files.contents import STATE
from ckpt.files.disk import replacing, sync

LATEST = "latest"
# At most 20 digits: a longer name would exceed the limit of a file's name.
_STEP = re.compile(r"step-([0-9]{8,20})")


def folder_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Return the step whose folder has this name.

    Raises:
        ValueError: The name is no step's; says which names are.
    """
    match = _STEP.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is not the folder of a step; the folder of step 12 is called {folder_name(12)}")
    return int(match[1])


def point_to(root: Path, name: str) -> None:
    """Replace `latest` in one step, so that it names a checkpoint."""
    with replacing(root / LATEST) as file:
        file.write(f"{name}\n".encode())
        file.flush()
        if (root / LATEST).is_file():
            take_mode(file.fileno(), os.stat(root / LATEST))
        os.fsync(file.fileno())
    sync(root)


def saved_steps(root: str | os.PathLike[str]) -> list[int]:
    """Return the steps whose checkpoints are complete, oldest first."""
    matches = (_STEP.fullmatch(entry.name) for entry in Path(root).glob("step-*"))
    return sorted(int(match[1]) for match in matches if match and (Path(root) / match[0] / STATE).is_file())


def latest_step(root: str | os.PathLike[str]) -> int | None:
    """Return the step that `latest` names; None in a folder without checkpoints.

    Raises:
        ValueError: `latest` is damaged, or names an absent checkpoint.
    """
    pointer = Path(root) / LATEST
    if not pointer.is_file():
        return None
    # Bytes that are no text are shown in the error.
    name = pointer.read_bytes().decode("utf-8", "backslashreplace").strip()
    match = _STEP.fullmatch(name)
    if match is None or not (Path(root) / name / STATE).is_file():
        raise ValueError(
            f"{pointer} names {name!r:.200}, which is no checkpoint; write the name of a step's folder into it, of the "
            f"steps {saved_steps(root)}"
        )
    return int(match[1])


def steps_of_latest(root: str | os.PathLike[str]) -> list[int]:
    """Return the complete steps up to `latest`, oldest first.

    A later step belongs to a run that was left when training went back to an earlier step.
    """
    latest = latest_step(root)
    return [] if latest is None else [step for step in saved_steps(root) if step <= latest]


def prune(root: Path, keep: int | None) -> None:
    """Remove all but `keep` checkpoints; the newest up to `latest` stay first, then later steps of a run that was left.

    Each is renamed before its files are removed: a kill in between leaves a leftover, never half a checkpoint.
    """
    current = steps_of_latest(root)
    abandoned = [step for step in saved_steps(root) if step not in current]
    for step in [] if keep is None else [*abandoned, *current][:-keep]:
        folder = root / folder_name(step)
        gone = root / f".{folder.name}.saving-{os.getpid()}-pruned"
        os.rename(folder, gone)
        remove_checkpoint(gone, folder)
