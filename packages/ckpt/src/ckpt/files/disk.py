"""Sync files to the disk, and explain a full disk."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
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

    Args:
        needed: The bytes of the whole save.
        folder: The folder of the save; it need not exist yet.

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
