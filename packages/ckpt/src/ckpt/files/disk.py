"""Sync and replace files, explain why a disk refuses a write, and refuse files that were replaced while being read."""

import contextlib
import errno
import os
import re
import resource
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# The errors of a disk that refuses a write: what is wrong with {path}, and what to do.
REFUSALS = {
    errno.ENOSPC: "the disk of {path} is full: {needs}{free:,} are free; free some, or save elsewhere",
    errno.EFBIG: "a file at {path} would be larger than {limit}; raise the limit, or save elsewhere",
    errno.EROFS: "{path} lies on a file system that is mounted read-only; mount it for writing, or save elsewhere",
    errno.EACCES: "{path} is closed to this user; give the user the right to write there, or save elsewhere",
    errno.EIO: "the disk of {path} does not work; look at the messages of the kernel, and save elsewhere",
}
REFUSALS |= {errno.EDQUOT: REFUSALS[errno.ENOSPC], errno.EPERM: REFUSALS[errno.EACCES]}
# The end of the text of an error of a library that is written in Rust, such as safetensors or tokenizers.
_RUST = re.compile(r"\(os error (\d+)\)\W*$")


@contextlib.contextmanager
def room_for(needed: int | None, path: str | os.PathLike[str]) -> Iterator[None]:
    """Explain the error of a call that the disk refuses; let any other error pass.

    The whole save needs `needed` bytes (None: unknown) at `path`, a file or a folder, which need not exist yet.

    Raises:
        OSError: The disk or a quota is full, a file is larger than the process may write, the file system is read-only,
            the user has no right, or the disk is broken; names the path and what to do. Its `errno` is None.
    """
    try:
        yield
    except Exception as error:
        number = _number_of(error)
        if number not in REFUSALS:
            raise
        where = Path(os.path.abspath(path))
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        text = REFUSALS[number].format(
            path=where,
            needs="" if needed is None else f"the save needs {needed:,} bytes, ",
            free=shutil.disk_usage(next(path for path in (where, *where.parents) if path.is_dir())).free,
            limit="its file system allows"
            if most == resource.RLIM_INFINITY
            else f"the limit of this process, {most:,} bytes (`ulimit -f`)",
        )
        raise OSError(f"{text} ({os.strerror(number)})") from None


def _number_of(error: Exception) -> int | None:
    """Return the errno of an error of the disk; None for other errors."""
    if isinstance(error, OSError):
        return error.errno
    in_rust = _RUST.search(str(error)) if isinstance(error, SafetensorError) or type(error) is Exception else None
    return int(in_rust[1]) if in_rust else None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` when the body ends; after an error or a kill the old file stays.

    Several processes may replace a file at the same time: each time it is the whole file of one of them.
    """
    temporary = path.with_name(f".{path.name}.saving.{os.getpid()}-{secrets.token_hex(4)}")
    unnamed = _unnamed_file(path.absolute().parent)
    try:
        with unnamed or open(temporary, "xb") as file:
            yield file
            file.flush()
            if unnamed is not None:
                # Given a descriptor, os.link follows the link in /proc to the unnamed file.
                os.link(f"/proc/self/fd/{unnamed.fileno()}", temporary, src_dir_fd=unnamed.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _unnamed_file(folder: Path) -> BinaryIO | None:
    """Open an unnamed file, which a kill removes; None where the file system has no unnamed files."""
    try:
        return open(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), "wb")
    except (AttributeError, OSError):
        return None


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
