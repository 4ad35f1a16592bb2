"""`RunStore`: the copy of a run's folder in a store, such as s3://bucket/run, from which another machine goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt.files import Store
from rl_train.loop.recipe import STOP, Tell
from rl_train.loop.url_lock import TakenError, UrlLock
from rl_train.options.fields import place_of
from rl_train.report.loggers import IDENTITY
from rl_train.trajectories.rollout_files import ROLLOUTS

# The file of a folder that is written last: a folder of checkpoints without it is not whole. Stores have no rename.
_MARKS = ("state.json", "config.json", "adapter_config.json")
_RUN, _LATEST = "options.json", "latest"
# What a run removes again: older checkpoints, and rollouts of steps that are taken again.
_REMOVED = ("training/", f"{ROLLOUTS}/")


class RunStore:
    """The copy of a run's folder in a store.

    A store writes each object whole or not at all, but several objects one after another. So the mark of a folder,
    `state.json` of a training checkpoint and `config.json` of a result, is removed first and written last, and
    `training/*/latest` follows the checkpoints. A checkpoint without its mark is ignored.

    Args:
        folder: The folder on this machine.
        store: The place of its copy.

    Attributes:
        lock: The lock of the copy.
    """

    def __init__(self, folder: Path, store: Store) -> None:
        self._folder, self._store, self._sent = folder, store, dict[str, tuple[int, int]]()
        self.lock = UrlLock(store, folder)

    @classmethod
    def of(cls, folder: Path) -> RunStore | None:
        """Return the store of a folder of `working_copy`; None for another folder."""
        store = Store.of(place_of(folder))
        return None if store is None else cls(folder, store)

    def pull(self) -> None:
        """Download the run, where the store has a later checkpoint than this machine; `latest` comes last.

        Raises:
            ValueError: The store cannot be read, or holds other files than a run.
        """
        action = "read as the copy of a run"
        with self._store.errors(action):
            names = self._names()
        if names and _RUN not in names:
            raise ValueError(
                f"{self._store.url} cannot be {action}: it holds other files, such as {names[0]}, and no {_RUN} of a "
                "run; choose another out"
            )
        with self._store.errors(action):
            if not names or (self._here(_RUN).is_file() and self._newest(names) <= self._newest_here()):
                return
            for name in sorted(filter(_whole(names), names), key=_order):
                source, target = self._there(name), self._here(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f".{target.name}.pulled")
                self._store.files.get_file(source, str(partial))
                os.replace(partial, target)

    def push(self) -> None:
        """Upload what has changed, and remove checkpoints and rollouts that this machine has removed.

        Raises:
            TakenError: Another machine runs at the URL, or the store has a later checkpoint, which the upload would
                remove.
        """
        self.lock.check()
        names = self._names()
        if (newest := self._newest(names).strip()) > self._newest_here():
            raise TakenError(
                f"another machine goes on with this run: {self._store.url} has {newest}, which {self._folder} lacks; "
                "let one machine alone run it"
            )
        files = [file for file in self._folder.rglob("*") if file.is_file()]
        here = dict[str, tuple[int, int]]()
        for file in files:
            name = file.relative_to(self._folder).as_posix()
            if _is_copied(name) and (facts := _facts(file)) is not None:
                here[name] = facts
        there, changed = set(names), {name for name in here if self._sent.get(name) != here[name]}
        for mark in {f"{os.path.dirname(name)}/{mark}" for name in changed for mark in _MARKS} & here.keys():
            changed.add(mark)
            if mark in there:
                self._store.files.rm_file(self._there(mark))
        removed = set[str]()
        for name in sorted(changed, key=_order):
            if os.path.dirname(name) in removed:
                continue
            try:
                self._store.child(name).make_parent()
                self._store.files.put_file(str(self._here(name)), self._there(name))
                self._sent[name] = here[name]
            except FileNotFoundError:
                if self._here(name).exists():
                    raise
                removed.add(os.path.dirname(name))  # an older checkpoint was removed meanwhile
        for name in sorted(there - here.keys(), key=_order, reverse=True):
            if name.startswith(_REMOVED):
                self._store.files.rm_file(self._there(name))

    @contextmanager
    def pushed(self, tell: Tell) -> Iterator[Tell]:
        """Return a function for events that uploads in the background after steps, and upload all at the end.

        An upload that fails is told, and tried again after the next step. Where another machine goes on with the run,
        this one saves its next step on this machine, and ends.

        Raises:
            TakenError: Another machine goes on with the run.
            ValueError: The last upload failed; the run is complete on this machine.
        """
        pending: list[Future[None]] = []

        def follow(event: Mapping[str, Any]) -> None:
            if pending and not pending[-1].done():
                return
            if isinstance(error := pending[-1].exception() if pending else None, TakenError):
                self._here(STOP).touch()
            if "step" not in event:
                return
            if error is not None and not isinstance(error, TakenError):
                tell({"message": f"{self._store.url} is behind: {error!r:.300}; the upload is tried again"})
            pending[:] = [pool.submit(self.push)]

        with ThreadPoolExecutor(1, "uploads") as pool:
            try:
                yield follow
            finally:
                final = pool.submit(self.push).exception()
                if final is not None:
                    tell({"message": f"{self._store.url} is behind {self._folder}"})
        if isinstance(final, TakenError):
            raise TakenError(f"{final}. This machine has ended, and keeps its own steps in {self._folder}")
        if final is not None:
            raise ValueError(
                f"{self._store.url} cannot be written: {final!r:.300}; the run is complete in {self._folder}, and the "
                "same command uploads it"
            )

    def _names(self) -> list[str]:
        """Return the names of all objects of the copy, relative to it."""
        self._store.files.invalidate_cache()
        root = self._store.path.rstrip("/") + "/"
        return sorted(
            filter(_is_copied, (name.removeprefix(root) for name in self._store.files.find(self._store.path)))
        )

    def _newest(self, names: Sequence[str]) -> str:
        latest = [name for name in names if name.startswith("training/") and name.endswith(f"/{_LATEST}")]
        return max((self._store.files.cat_file(self._there(name)).decode() for name in latest), default="")

    def _newest_here(self) -> str:
        return max((file.read_text() for file in self._folder.glob(f"training/*/{_LATEST}")), default="")

    def _here(self, name: str) -> Path:
        return self._folder / name

    def _there(self, name: str) -> str:
        return str(self._store.child(name).path)


def _is_copied(name: str) -> bool:
    """Say whether a file of a run belongs to its copy: it is not hidden, or is the id of the run in loggers."""
    return name == IDENTITY or not any(part.startswith(".") and part.strip(".") for part in name.split("/"))


def _whole(names: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that says whether a file is no part of a checkpoint without its mark."""
    marked = {os.path.dirname(name) for name in names if os.path.basename(name) in _MARKS}
    checkpoints = {os.path.dirname(name) for name in names if name.endswith(".safetensors")} - {"training/ahead"}
    return lambda name: os.path.dirname(name) not in checkpoints - marked


def _order(name: str) -> tuple[int, str]:
    """Return the order of uploads: the files of the run, those of checkpoints, their marks, and what names them."""
    base = os.path.basename(name)
    return (3 if base == _LATEST else 2 if "/" in name and base in _MARKS else 1 if "/" in name else 0), name


def _facts(file: Path) -> tuple[int, int] | None:
    """Return the size and the time of change of a file; None for a file that was removed meanwhile."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns
