"""Files in stores that fsspec reaches by a URL, such as s3://bucket/folder."""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

# A path of pathlib has one slash where the URL has two or three.
_URL = re.compile(r"([a-z][a-z0-9+]+):/+(.+)")
# The facts that tell versions of an object apart; the second ones where a store has no fact but the size of the first.
_FACTS = ("size", "ETag", "mtime", "created")
_OTHER_FACTS = ("etag", "last_modified", "Last-Modified", "modified", "modificationTime", "modify", "blob_id")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Store(NamedTuple):
    """A URL, its file system of fsspec, and the path in it."""

    url: str
    files: Any
    path: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "Store | None":
        """Return the store of a URL, also one that has been a `pathlib.Path`; None for a path on this machine.

        Raises:
            ValueError: The package for this kind of URL is not installed, or there is no such kind.
        """
        match = _URL.fullmatch(os.fspath(path))
        if match is None:
            return None
        import fsspec  # imported here: only URLs need it; torch requires it

        scheme, rest = match.groups()
        url = f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
        try:
            return cls(url, *fsspec.core.url_to_fs(url))
        except (ImportError, ValueError) as error:
            raise ValueError(f"{url} cannot be opened: {error}; for s3:// pip install s3fs") from None

    @contextmanager
    def errors(self, action: str = "read") -> Iterator[None]:
        """Turn any error of the store, each of which has its own kinds, into a ValueError with the URL."""
        try:
            yield
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in _FULL and action == "read"
            fix = "; set TMPDIR or, for models, XDG_CACHE_HOME to a folder on a larger disk" if full else ""
            raise ValueError(f"{self.url} cannot be {action}: {error!r:.300}{fix}") from None

    @property
    def version(self) -> list[str]:
        """Return facts that differ between versions of the object: its size, and its tag or time of change."""
        return _version(self.files.info(self.path))

    def child(self, name: str) -> "Store":
        """Return the object of this name in this folder.

        Raises:
            ValueError: The name leads out of the folder. Stores take any name, such as "a/../b" and "a//b".
        """
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise ValueError(f"the name {name!r} leads out of its folder")
        return Store(f"{self.url.rstrip('/')}/{name}", self.files, f"{self.path.rstrip('/')}/{name}")

    def make_parent(self) -> None:
        """Make the folder of this object where the store has folders, such as sftp://; stores of objects have none."""
        if not self.files.async_impl:
            self.files.makedirs(self.path.rpartition("/")[0] or "/", exist_ok=True)

    def copied(self, patterns: Sequence[str], ignore: Sequence[str] = ()) -> str:
        """Return a folder in the local cache with the files of a checkpoint, and download it if it is new.

        Args:
            patterns, ignore: Patterns of the names of the files to download, and of those to leave out.

        Raises:
            ValueError: The store cannot be read, or the folder has no config.json, which an upload writes last.
        """
        entries = self._entries()
        if "config.json" not in entries:
            raise ValueError(
                f"{self.url} is no checkpoint folder, or its upload was interrupted: it has no config.json, which is "
                "written last; upload it again"
            )
        names = [name for name in sorted(entries) if _matches(name, patterns) and not _matches(name, ignore)]
        facts = _versions(entries, names)
        version = hashlib.sha256(json.dumps([self.url, facts]).encode()).hexdigest()[:16]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-train" / "checkpoints"
        folder = cache / version / Path(self.path).name
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=folder.parent))
            try:
                for name in names:
                    self.files.get_file(entries[name]["name"], str(partial / name))
                if _versions(self._entries(), names) != facts:
                    raise ValueError("it was replaced while it was read; read again once nothing is saved there")
                os.replace(partial, folder)
            except Exception:
                if not folder.is_dir():  # else another process was faster
                    with self.errors():
                        raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return str(folder)

    def _entries(self) -> dict[str, Mapping[str, Any]]:
        """Return the facts of each object in this folder by its name."""
        with self.errors():
            self.files.invalidate_cache()
            return {Path(entry["name"]).name: entry for entry in self.files.ls(self.path, detail=True)}


def _versions(entries: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[list[str]]:
    return [[name, *_version(entries.get(name, {}))] for name in names]


def _version(entry: Mapping[str, Any]) -> list[str]:
    facts = [str(entry.get(fact)) for fact in _FACTS]
    return facts if any(entry.get(fact) for fact in _FACTS[1:]) else facts + [str(entry.get(f)) for f in _OTHER_FACTS]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
