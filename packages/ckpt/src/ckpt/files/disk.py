"""Sync files to the disk, explain a full disk, and refuse files that were replaced while they were read."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def room_for(needed: int, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Explain the error of a call that finds the disk full; let any other error pass.

    The whole save needs `needed` bytes in `folder`, which need not exist yet.

    Raises:
        OSError: The disk or a quota is full; names the folder, the bytes needed and the bytes free.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = Path(os.path.abspath(folder))
        free = shutil.disk_usage(next(path for path in (where, *where.parents) if path.is_dir())).free
        raise OSError(
            f"the disk of {where} is full: the save needs {needed:,} bytes, {free:,} are free; free some, or save "
            f"elsewhere ({error.strerror})"
        ) from None


@contextlib.contextmanager
def while_unchanged(files: Mapping[Path, int]) -> Iterator[None]:
    """Check, after reading, that no file was replaced; a replaced file takes precedence over any other error.

    A save replaces a folder as a whole, but a reader opens the files one after another, and could mix two versions. The
    time of the last change, in ticks of the file system (mostly milliseconds), identifies a file's version. Inode
    numbers would not do: some network file systems change them. `files` has each `st_mtime_ns` from before the reading.
    """
    try:
        yield
    finally:
        for path, modified_ns in files.items():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime_ns == modified_ns:
                    continue
            raise ValueError(
                f"{path} was replaced while it was read, so that the tensors may be of two versions; "
                "read again once nothing is saved there"
            )
