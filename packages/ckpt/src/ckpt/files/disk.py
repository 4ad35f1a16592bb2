"""What a full disk says: where it is, how much a save needs, and how much is free."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def room_for(needed: int, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Explain the error of whichever call inside finds the disk full; any other error is left as it is.

    Args:
        needed: the bytes of the whole save.
        folder: where it goes; it need not exist yet.

    Raises:
        OSError: the disk is full, or a quota is used up; names the folder, what is needed and what is free.
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


def bytes_in(folder: Path) -> int:
    """The sizes of a folder's files."""
    return sum(entry.stat().st_size for entry in folder.iterdir())
