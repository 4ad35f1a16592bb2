"""`Lock`: one process at a time writes a file or a folder."""

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import Self


def lock_file(path: Path) -> Path:
    """Return the file that a `Lock` of a path holds: `.NAME.lock` beside it."""
    return path.with_name(f".{path.name}.lock")


class Lock:
    """Hold `flock` on `.NAME.lock` beside a path of that name until `release`, or until the process ends.

    The file names the process and its machine. Where a file system has no locks, every process gets the lock, and
    `alone` is False.

    Args:
        path: The path; it need not exist, and its folder must.
        work: What the holder does, such as "saves to OUT", for the error of other processes.

    Raises:
        ValueError: Another process, or another lock of this process, holds it; names the process and the work.
    """

    def __init__(self, path: Path, work: str) -> None:
        self._file, self._fd = lock_file(path), -1
        while self._fd < 0:
            fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            locked = try_lock(fd)
            if locked is False:
                holder = os.pread(fd, 1000, 0).decode(errors="replace").strip() or "another process"
                os.close(fd)
                raise ValueError(f"{holder} {work}; wait until it ends, or choose another path")
            # The holder before may have removed the file after it was opened here.
            if _is_at(fd, self._file):
                self._fd, self.alone = fd, locked is not None
            else:
                os.close(fd)
        with contextlib.suppress(OSError):  # A full disk: the lock holds without the name.
            os.truncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} of {socket.gethostname()}\n".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the file and give the lock back; a second call does nothing."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._file.unlink()
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # also where a fork has inherited the descriptor
            os.close(self._fd)
            self._fd = -1


def try_lock(fd: int) -> bool | None:
    """Lock an open file; return False if another holder has it locked, and None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Return whether a path still names the open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
