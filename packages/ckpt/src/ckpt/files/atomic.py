"""Write a folder beside its target under a temporary name, sync it, and put it in place in one step.

A save to `DIR/name` works in `DIR/.name.saving-*`. When the target exists, the two folders change places in one system
call (`renameat2` with `RENAME_EXCHANGE`), so at every instant `name` is a complete checkpoint. Where the file system
cannot exchange, the old folder is first renamed to `.name.previous`; a kill between the two renames leaves it there,
complete. The next save to the same target removes the temporary folder of a killed save, on which nobody holds a lock.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
import warnings
from collections.abc import Iterable
from pathlib import Path

from ckpt.files.contents import entries, foreign, is_known
from ckpt.files.disk import sync

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_target(target: Path) -> None:
    """Refuse a target that is no checkpoint, or that holds other files, which a save would delete.

    Raises:
        ValueError: The target is a file, lies in a file, is a mount point, or has a file that no checkpoint
            of its kind has (`ckpt.files.contents`). The error names the file.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ValueError(f"{target} exists and is no folder; choose another path or remove it")
    above = next(filter(os.path.lexists, target.parents), target)
    if not above.is_dir():
        raise ValueError(f"{above} is no folder, and {target} would lie in it; choose another path, or remove {above}")
    if os.path.ismount(target):
        raise ValueError(f"{target} is a mount point, which cannot be replaced; save into a folder below it")
    held = sorted(entry.name for entry in target.iterdir()) if target.is_dir() else []
    others = foreign(target) if held else []
    if others is None:
        raise ValueError(f"{target} exists and is no checkpoint ({held[:3]}); choose another path or empty it")
    if others:
        raise ValueError(
            f"{target} holds more than a checkpoint, {others[:5]} ({len(others)} in all), which a save in its place "
            "would delete; choose another path, or move the rest elsewhere first"
        )


class FolderWriter:
    """A temporary folder beside its target, made by one process; `commit` puts it in place, `discard` removes it."""

    def __init__(self, target: Path) -> None:
        self.target = Path(os.path.abspath(target))
        check_target(self.target)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{self.target.name}.saving-"
        remove_abandoned(self.target.parent.glob(f"{glob.escape(prefix)}*"))
        # Where folders cannot change places, the old one lies here between two renames.
        self._previous = self.target.with_name(f".{self.target.name}.previous")
        if self._previous.is_dir():
            if self.target.exists():
                remove_checkpoint(self._previous, self.target)
            else:
                os.rename(self._previous, self.target)
        self._found = _inode(self.target)
        self._held = set(entries(self.target)) if self._found else set()
        self._committed = False
        self.path = self.target.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")
        # The new version of a private folder must be private from its first byte on.
        self.path.mkdir(0o700 if self._found else 0o777)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Some network file systems have no locks; there no folder counts as abandoned.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()  # does nothing after a commit

    def commit(self) -> None:
        """Sync the folder, put it in the target's place, and remove the checkpoint that was there.

        The new folder takes the old folder's mode and group, and each file those of the old file of its name. Files
        that somebody has added to the target meanwhile are kept, and a RuntimeWarning says where. After an error the
        target is unchanged.
        """
        if self.target.is_dir():
            _take_modes(self.path, self.target)
        sync(self.path)
        with contextlib.ExitStack() as undo:
            replaced = self._put_in_place(undo)
            sync(self.target.parent)
            undo.pop_all()
            self._committed = True
        if replaced is not None:
            # If another save has replaced the target meanwhile, all files of that save go.
            same = _inode(replaced) == self._found
            remove_checkpoint(replaced, self.target, self._held if same else None)
        self._release()

    def _put_in_place(self, undo: contextlib.ExitStack) -> Path | None:
        """Exchange the folder and the target; return where the old target is now."""
        if not os.path.lexists(self.target):
            os.rename(self.path, self.target)
            undo.callback(os.rename, self.target, self.path)
            return None
        if _exchange(self.path, self.target):
            undo.callback(_exchange, self.path, self.target)
            return self.path
        os.rename(self.target, self._previous)
        undo.callback(os.rename, self._previous, self.target)
        os.rename(self.path, self.target)
        undo.callback(os.rename, self.target, self.path)
        return self._previous

    def discard(self) -> None:
        """Remove the temporary folder; the target stays as it was."""
        if not self._committed:
            shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove temporary folders whose process is gone; their names are `.NAME.saving-*`."""
    for folder in folders:
        if not _is_in_use(folder):
            remove_checkpoint(folder, folder.with_name(folder.name[1:].rpartition(".saving-")[0]))


def remove_checkpoint(folder: Path, target: Path, held: set[str] | None = None) -> None:
    """Remove a checkpoint's folder; keep files that no checkpoint has in `TARGET.kept-*`, and warn with their names.

    `held` names the entries that may go; None: all that have a checkpoint's names (`ckpt.files.contents`).
    """
    # A link or a file in the target's place is not ours: keep it as a whole.
    if folder.is_dir() and not folder.is_symlink():
        ours = {name for name in entries(folder) if is_known(name) and (held is None or name in held)}
        with contextlib.suppress(OSError):
            for name in ours:
                (folder / name).unlink()
            for inner in filter(Path.is_dir, folder.iterdir()):
                with contextlib.suppress(OSError):
                    inner.rmdir()
            folder.rmdir()
            return
        if ours.issuperset(entries(folder)):
            return  # The file system refused: the next save removes this leftover.
    kept = target.with_name(f"{target.name}.kept-{secrets.token_hex(4)}")
    os.rename(folder, kept)
    names = sorted(entry.name for entry in kept.iterdir()) if kept.is_dir() else []
    warnings.warn(
        f"{target} held {names[:5] or 'another file'}, which the checkpoint there did not have; a save removes "
        f"checkpoints alone, so the rest is kept in {kept}: move it to where it belongs",
        RuntimeWarning,
        stacklevel=4,
    )


def _inode(path: Path) -> tuple[int, int] | None:
    """Return the identity of a folder, which a new folder of the same name does not have; None without a folder."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _take_modes(folder: Path, old: Path) -> None:
    """Give a folder and its files the modes and groups of another checkpoint.

    A file takes the mode and group of the old file of its name, or of the first old file where that name is new.
    """
    modes = {name: os.stat(old / name) for name in entries(old) if (old / name).is_file()}
    for name in entries(folder):
        like = modes.get(name, next(iter(modes.values()), None))
        if like is not None:
            take_mode(folder / name, like)
    take_mode(folder, os.stat(old))


def take_mode(path: Path, like: os.stat_result) -> None:
    """Give a file or folder another one's mode and group."""
    own = os.stat(path)
    mode = stat.S_IMODE(like.st_mode)
    if own.st_gid != like.st_gid:
        try:
            os.chown(path, -1, like.st_gid)
        except OSError:
            # The new group gets the rights of all others, not those of the old group.
            mode = (mode & ~0o2070) | (mode & 0o007) << 3
    if stat.S_IMODE(os.stat(path).st_mode) != mode:
        os.chmod(path, mode)


def _is_in_use(leftover: Path) -> bool:
    """Return whether the process that made a temporary folder still holds its lock."""
    try:
        fd = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step; return False where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))
