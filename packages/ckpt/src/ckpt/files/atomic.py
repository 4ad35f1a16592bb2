"""Write a folder beside its target under a temporary name, sync it, and put it in place in one step.

A save to `DIR/name` works in `DIR/.name.saving-*`. When the target exists, the two folders change places in one system
call (`renameat2` with `RENAME_EXCHANGE`), so at every instant `name` is a complete checkpoint. Where the file system
cannot exchange, the old folder is first renamed to `.name.previous`; a kill between the two renames leaves it there,
complete. A save holds the `Lock` of its target: a second save to that target is refused meanwhile. The next save
removes what a killed save has left.
"""

import contextlib
import ctypes
import errno
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
from ckpt.files.locks import Lock, lock_file, try_lock
from ckpt.files.stores import Store

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_target(target: Path) -> None:
    """Refuse a target that is no checkpoint, or that holds other files, which a save would delete.

    Raises:
        ValueError: The target is a URL, a file, lies in a file, is a mount point, or has a file that no checkpoint
            of its kind has (`ckpt.files.contents`). The error names the file.
    """
    if (store := Store.of(target)) is not None:
        raise ValueError(f"{store.url} is a URL; save into a folder of this machine, and upload the folder")
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
    """A temporary folder beside its target, made by one process; `commit` puts it in place, `discard` removes it.

    Raises:
        ValueError: See `check_target`; or another process is saving to the target.
    """

    def __init__(self, target: Path) -> None:
        check_target(target)
        self.target = Path(os.path.abspath(target))
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self.target, f"saves to {self.target}")
        try:
            self._begin()
        except BaseException:
            self._lock.release()
            raise

    def _begin(self) -> None:
        """Remove what killed saves have left, and make the temporary folder."""
        prefix = f".{self.target.name}.saving-"
        for leftover in self.target.parent.glob(f"{glob.escape(prefix)}*") if self._lock.alone else ():
            remove_checkpoint(leftover, self.target)
        # On file systems without an exchange, the old folder lies here between two renames.
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

        The new folder takes the old folder's mode and group, and each file the mode and group of the old file of its
        name. Foreign files in the target are kept, and a RuntimeWarning names their new folder. After an error the
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
        self._lock.release()

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
        self._lock.release()


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove temporary folders whose process is gone, with its lock; their names are `.NAME.saving-*`.

    Where a file system has no locks, a folder stays.
    """
    for folder in folders:
        target = folder.with_name(folder.name[1:].rpartition(".saving-")[0])
        try:
            fd = os.open(lock_file(target), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            remove_checkpoint(folder, target)  # Nobody saves to the target.
            continue
        try:
            if try_lock(fd):
                remove_checkpoint(folder, target)
                lock_file(target).unlink(missing_ok=True)
        finally:
            os.close(fd)


def remove_checkpoint(folder: Path, target: Path, held: set[str] | None = None) -> None:
    """Remove a checkpoint's folder; keep files that no checkpoint has in `TARGET.kept-*`, and warn with their names.

    `held` names the entries to remove; None: every entry with a checkpoint's name (`ckpt.files.contents`).
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
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


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


def take_mode(path: Path | int, like: os.stat_result) -> None:
    """Give a file or folder, a path or an open file's descriptor, the mode and group of another."""
    status = os.stat(path)
    mode = stat.S_IMODE(like.st_mode)
    if status.st_gid != like.st_gid:
        try:
            os.chown(path, -1, like.st_gid)
        except OSError:
            # The new group gets the rights of all others, not the rights of the old group.
            mode = (mode & ~0o2070) | (mode & 0o007) << 3
    if stat.S_IMODE(os.stat(path).st_mode) != mode:
        os.chmod(path, mode)


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
