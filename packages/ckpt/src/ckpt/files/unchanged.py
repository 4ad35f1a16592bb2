"""Refuse files that another process has replaced since their headers were read.

A save replaces a folder as a whole, but a reader opens the files one after another, and could mix two versions. The
time of the last change identifies a file's version, in ticks of the file system (mostly milliseconds). Inode numbers
would not do: some network file systems change them.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path


@contextlib.contextmanager
def while_unchanged(files: Mapping[Path, int]) -> Iterator[None]:
    """Check, after reading, that no file was replaced; a replaced file takes precedence over any other error.

    Args:
        files: The time of each file's last change (`st_mtime_ns`), taken before the file was read.
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
