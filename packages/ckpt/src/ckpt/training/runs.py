"""A run's folder of checkpoints: which are complete, which is the latest, which are to go."""

import os
import re
from pathlib import Path

from ckpt.files.atomic import remove_abandoned, remove_checkpoint, sync_folder, take_mode
from ckpt.files.contents import STATE

LATEST = "latest"
# More digits than any run has steps would be too long for a file's name.
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
    """Let `latest` name a checkpoint, in one step."""
    temporary = root / f".{LATEST}.saving"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(f"{name}\n")
        file.flush()
        os.fsync(file.fileno())
    if (root / LATEST).is_file():
        take_mode(temporary, os.stat(root / LATEST))
    os.replace(temporary, root / LATEST)
    sync_folder(root)


def saved_steps(root: str | os.PathLike[str]) -> list[int]:
    """Return the steps whose checkpoints are complete, oldest first."""
    found = (_STEP.fullmatch(entry.name) for entry in Path(root).glob("step-*"))
    return sorted(int(match[1]) for match in found if match and (Path(root) / match[0] / STATE).is_file())


def latest_step(root: str | os.PathLike[str]) -> int | None:
    """Return the step that `latest` names; None where nothing has been saved.

    Raises:
        ValueError: The pointer is damaged, or names a checkpoint that is not there.
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
    """Return the complete steps of the run that `latest` belongs to, oldest first: those up to it.

    A later step is of a run that was left when another one went back behind it.

    Raises:
        ValueError: As `latest_step`.
    """
    latest = latest_step(root)
    return [] if latest is None else [step for step in saved_steps(root) if step <= latest]


def remove_leftovers(root: Path) -> None:
    """Remove what killed saves of any step have left, unless a living one is at work there."""
    remove_abandoned(root.glob(".step-*.saving-*"))


def prune(root: Path, keep: int | None) -> None:
    """Remove all but `keep` checkpoints: the newest up to `latest`, and only then later ones of a run that was left.

    Each disappears in one step first: a kill in the middle leaves a leftover, and never half a checkpoint.
    """
    own = steps_of_latest(root)
    left = [step for step in saved_steps(root) if step not in own]
    for step in [] if keep is None else [*left, *own][:-keep]:
        folder = root / folder_name(step)
        gone = root / f".{folder.name}.saving-{os.getpid()}-pruned"
        os.rename(folder, gone)
        remove_checkpoint(gone, folder)
