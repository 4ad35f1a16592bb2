"""Check models and output folders before any rank starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ckpt
from ckpt.files.atomic import check_target, remove_abandoned
from ckpt.files.disk import room_for
from ckpt.transfer.match import match
from parallel_layers import ParallelDims
from parallel_layers.model import ModelConfig
from rl_models.engines import EngineOptions, Role
from rl_models.engines.parallel.load import require_fit
from rl_models.grid import checkpoint_folder
from rl_train.planner.plan import MemoryOptions, plan_memory


def check_native_model(path: Path, role: Role, dims: ParallelDims, options: EngineOptions, max_tokens: int) -> None:
    """Refuse a checkpoint that the ranks of the native backend would refuse; only headers are read.

    Raises:
        ValueError: There is no checkpoint folder; the family is unknown; an option has no effect on this grid; heads,
            layers or experts do not divide over the grid; or a file is broken or has other tensors than the config
            says. The error names the values and the fix.
    """
    folder = checkpoint_folder(path)
    config = ModelConfig.from_hf(folder)
    require_fit(config, dims, options)
    memory = MemoryOptions(dims, max_tokens, recompute=options.recompute, pipeline=options.pipeline)
    plan_memory(Path(folder), memory, role=role, trained=True)
    match(ckpt.open_checkpoint(folder), ckpt.layout_for(config.hf, target="parallel", role=role))


def check_output(folder: Path, *, files: Sequence[str] = (), checkpoints: Sequence[str] = ()) -> None:
    """Refuse an unusable folder for results before the computation; nothing is created.

    Args:
        folder: The folder of the results, which may not exist yet.
        files: Names of the files to write into the folder.
        checkpoints: Names of the checkpoint folders to write; only a checkpoint folder is replaced.

    Raises:
        ValueError: Something cannot be written, or something else is in its place; the error names the path.
    """
    check_writable(folder)
    for file in (folder / name for name in files):
        if file.is_dir():
            raise ValueError(f"{file} is a folder, and a file is to be written there; choose another than {folder}")
        if file.exists() and not os.access(file, os.W_OK):
            raise ValueError(f"{file} cannot be written to; choose another folder than {folder}")
    for name in checkpoints:
        check_target(folder / name)


def check_foreign(folder: Path, *, mark: str) -> None:
    """Raise ValueError if `folder` holds files, but not `mark`, which every folder of such results has."""
    held = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    # A kill may leave a temporary file or folder of the mark.
    if mark not in held and (others := [name for name in held if not name.startswith(f".{mark}.")]):
        raise ValueError(
            f"{folder} holds other files, {others[:5]} ({len(others)} in all), and no {mark} of an earlier run; choose "
            "another out, or move them elsewhere"
        )


def check_writable(folder: Path) -> None:
    """Raise ValueError unless files can be written into `folder`, or into its nearest existing parent."""
    existing = folder.absolute()
    try:
        while not _is_there(existing):
            existing = existing.parent
        if existing.is_file() and existing == folder.absolute():
            raise ValueError(f"{folder} exists and is no folder; choose another")
        if existing.is_file():
            raise ValueError(f"{existing} is a file, so {folder} cannot be a folder; choose another")
        # Probe with an anonymous temporary file: permissions alone do not show a read-only or full disk.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        why = f"{existing} cannot be written to ({error.strerror})"
        raise ValueError(f"{why}; choose another folder than {folder}") from None


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically; after a kill the old file is complete, and the next call replaces the temporary."""
    temporary = path.with_name(f".{path.name}.saving")
    with room_for(len(text), path.parent):
        temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def remove_leftovers(*folders: Path) -> None:
    """Remove the temporary checkpoint folders of ended processes; the folders of living processes stay."""
    for folder in folders:
        remove_abandoned(folder.glob(".*.saving-*"))


def _is_there(path: Path) -> bool:
    """Say whether the path exists, as a dangling link too; raise OSError for an impossible name."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
