"""Whether files are still what they were when their headers were read: another process may save to a folder meanwhile.

A save replaces a folder as a whole, but a reader opens its files one after another, and so may get some of each. Files
are told apart by when they were last modified, in ticks of the file system (milliseconds, mostly): not by their inodes,
which some network file systems make up anew.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path


def require_unchanged(files: Mapping[Path, int]) -> None:
    """Refuse files that have been written or replaced.

    Args:
        files: when each was last modified (`st_mtime_ns`), as seen before anything that depends on it was read.

    Raises:
        ValueError: names the first.
    """
    for path, modified_ns in files.items():
        try:
            same = os.stat(path).st_mtime_ns == modified_ns
        except FileNotFoundError:
            same = False
        if not same:
            raise ValueError(
                f"{path} was replaced while it was read, so that what was read may be of two versions; "
                "read again once nothing is saved there"
            )


@contextlib.contextmanager
def while_unchanged(files: Mapping[Path, int]) -> Iterator[None]:
    """Read files whose headers are known; that they were replaced meanwhile explains every error.

    Raises:
        ValueError: as `require_unchanged`.
    """
    try:
        yield
    finally:
        require_unchanged(files)
