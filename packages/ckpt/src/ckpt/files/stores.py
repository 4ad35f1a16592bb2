"""Files in stores that fsspec reaches by a URL, such as s3://bucket/folder."""

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
            raise ValueError(f"{self.url} cannot be {action}: {error!r:.300}") from None

    @property
    def version(self) -> list[str]:
        """Return facts that differ between versions of the object: its size, and its tag or time of change."""
        return _version(self.files.info(self.path))

    def copied(self, patterns: Sequence[str], ignore: Sequence[str] = ()) -> str:
        """Return a folder in the local cache with the files of a checkpoint, and download it if it is new.

        Args:
            patterns, ignore: Patterns of the names of the files to download, and of those to leave out.

        Raises:
            ValueError: The store cannot be read, or the folder has no config.json, which an upload writes last.
        """
        with self.errors():
            self.files.invalidate_cache()
            entries = {Path(entry["name"]).name: entry for entry in self.files.ls(self.path, detail=True)}
        if "config.json" not in entries:
            raise ValueError(
                f"{self.url} is no checkpoint folder, or its upload was interrupted: it has no config.json, which is "
                "written last; upload it again"
            )
        names = [name for name in sorted(entries) if _matches(name, patterns) and not _matches(name, ignore)]
        facts = [[name, *_version(entries[name])] for name in names]
        version = hashlib.sha256(json.dumps([self.url, facts]).encode()).hexdigest()[:16]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-train" / "checkpoints"
        folder = cache / version / Path(self.path).name
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=folder.parent))
            try:
                for name in names:
                    self.files.get_file(entries[name]["name"], str(partial / name))
                os.replace(partial, folder)
            except Exception:
                if not folder.is_dir():  # else another process was faster
                    with self.errors():
                        raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return str(folder)


def _version(entry: Mapping[str, Any]) -> list[str]:
    return [str(entry.get(fact)) for fact in ("size", "ETag", "mtime", "created")]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
