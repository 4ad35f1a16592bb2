"""Mirrors: the folder of a checkpoint in a store as a folder on this machine, whose tensors come when they are read."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ckpt.files.contents import COMPANIONS, is_known, matches
from ckpt.files.stores import Store

# Files of weights. Their bytes stay in the store until they are read.
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".distcp"}
_FIRST_BYTES, _THREADS = 1 << 16, 8


@dataclass
class _Placeholder:
    """A file of weights in a mirror: of the size of the object in the store, with zeros behind its first bytes."""

    path: Path
    store: Store
    lock: threading.Lock = field(default_factory=threading.Lock)
    whole: bool = False

    def __post_init__(self) -> None:
        self._version, size = self.store.version, self.store.files.size(self.store.path)
        self._start: bytes = self.store.files.cat_file(self.store.path, start=0, end=min(size, _FIRST_BYTES))
        length = 8 + int.from_bytes(self._start[:8], "little")
        if self.path.suffix == ".safetensors" and len(self._start) < length <= size:
            self._start += self.store.files.cat_file(self.store.path, start=len(self._start), end=length)
        self._size = size
        self.path.write_bytes(self._start)
        os.truncate(self.path, size)
        self._modified = self.path.stat().st_mtime_ns

    def fetch(self) -> None:
        """Download the file, unless it is whole."""
        with self.lock:
            if self.whole:
                return
            partial = self.path.with_name(f".{self.path.name}.fetched")
            with self.store.errors():
                self.store.files.get_file(self.store.path, str(partial))
                self.store.files.invalidate_cache()
                changed = self.store.version != self._version
            if changed:
                raise ValueError(f"{self.store.url} was replaced while it was read; read again once nothing is saved")
            os.replace(partial, self.path)
            self._restore_time()
            self.whole = True

    def release(self) -> None:
        """Give the disk the room of the tensors back."""
        with self.lock:
            os.truncate(self.path, len(self._start))
            os.truncate(self.path, self._size)
            self._restore_time()
            self.whole = False

    def _restore_time(self) -> None:
        # Readers check that a file has not changed since they read its header.
        os.utime(self.path, ns=(self._modified, self._modified))


def _of_checkpoint(name: str) -> bool:
    """Say whether a file belongs to a checkpoint, a training run, or weights in another format."""
    folder, _, base = name.rpartition("/")
    known = is_known(base) or base == "latest" or PurePosixPath(base).suffix in _WEIGHTS
    return is_known(name) or (known and (not folder or folder.startswith("step-")))


# The placeholders of the mirrors that are open, by their paths.
_placeholders: dict[Path, _Placeholder] = {}


@contextlib.contextmanager
def mirrored(path: str | os.PathLike[str], includes: Callable[[str], bool] = _of_checkpoint) -> Iterator[Path]:
    """Yield a path of this machine as it is; for a URL, the same folder or file in a temporary folder.

    Files of weights have their headers at once; `open_weights` and `fetch` download one when it is read, and `release`
    makes room for the next one.

    Args:
        path: A folder, or a file, with which the files beside it come.
        includes: Says of a file's path in the folder whether the mirror has the file (default: those of checkpoints).

    Raises:
        ValueError: The store cannot be read, or has no such folder or file.
    """
    if (store := Store.of(path)) is None:
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-", ignore_cleanup_errors=True) as temporary:
        files: list[Path] = []
        try:
            with store.errors():
                store.files.invalidate_cache()
                url, top, name = store.url.rstrip("/"), store.path.rstrip("/"), ""
                if is_file := store.files.isfile(store.path):
                    (url, _, _), (top, _, name) = url.rpartition("/"), top.rpartition("/")
                objects = store.files.find(top, maxdepth=1 if is_file else None)
                names = [name for name in (entry.removeprefix(f"{top}/") for entry in objects) if includes(name)]
                if not names:
                    raise FileNotFoundError(f"none of its {len(objects)} files is one of a checkpoint or a run")
                folder = Path(temporary) / PurePosixPath(top).name
                files = [folder / name for name in names]
                with ThreadPoolExecutor(_THREADS) as pool:
                    list(pool.map(lambda name: _bring(Store(url, store.files, top), name, folder), names))
            yield folder / name
        except (ValueError, OSError) as error:
            if (here := f"{temporary}/{PurePosixPath(top).name}") not in str(error):
                raise
            raise ValueError(str(error).replace(here, url)) from None
        finally:
            for file in files:
                _placeholders.pop(file, None)


def _bring(top: Store, name: str, folder: Path) -> None:
    """Write a file of a store's folder into a folder of this machine; a placeholder for a file of weights."""
    source, target = top.child(name), folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix in _WEIGHTS and not matches(name, COMPANIONS):
        _placeholders[target] = _Placeholder(target, source)
    else:
        source.files.get_file(source.path, str(target))


def fetch(path: Path) -> None:
    """Download a file of a mirror, unless it is whole; does nothing for other files."""
    if path in _placeholders:
        _placeholders[path].fetch()


def open_weights(path: Path) -> BinaryIO:
    """Open a file of weights, also of a mirror, to read bytes without a buffer."""
    fetch(path)
    return open(path, "rb", buffering=0)


def release(path: Path) -> None:
    """Give the disk the room of a file of a mirror back; does nothing for other files."""
    if path in _placeholders:
        _placeholders[path].release()
