"""`UrlLock`: one machine at a time runs at a URL."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread

from ckpt.files import Store
from rl_train.loop.recipe import Tell

# The object at the URL, and the file in the working copy with the text of the last lock that was held from there.
_NAME = ".options.json.held"
# Seconds between two writes of the holder, without a change after which a holder is gone, and between two looks.
_BEAT, _SILENCE, _LOOK = 15.0, 60.0, 1.0


class TakenError(ValueError):
    """Another machine goes on with the run; this one uploads nothing more, and ends."""


class UrlLock:
    """The object `.options.json.held` at the URL of a run: its process and machine. It changes while the run lives.

    A run that begins is refused where the object changes, and replaces an object that does not, as after a kill.
    Where the store has a conditional write (S3, GCS, Azure Blob), one of two runs that begin together is refused then.
    Elsewhere both may begin. The object names one of them, and `check` refuses the other one.

    Args:
        store: The URL of the run.
        folder: The working copy of the run, whose own lock the process holds.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._object, self._file = store, store.child(_NAME).path, folder / _NAME

    @contextmanager
    def held(self, tell: Tell) -> Iterator[None]:
        """Hold the lock; tell of a wait.

        Raises:
            ValueError: Another run is at work at the URL; names its process.
        """
        time_text, ended = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"), Event()
        holder = f"process {os.getpid()} of {socket.gethostname()}, since {time_text} ({secrets.token_hex(4)})"
        self._take(holder, tell)
        self._file.write_text(holder)
        thread = Thread(target=self._beat, args=(holder, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with suppress(Exception):  # the last upload has told of a store that cannot be reached
                if _holder(self._text()) == holder:
                    self._store.files.rm_file(self._object)

    def check(self) -> None:
        """Raise TakenError if another machine has taken the place of this one; names its process."""
        if (holder := _holder(self._text())) not in ("", self._own):
            raise TakenError(
                f"another machine goes on with this run: {holder} runs at {self._store.url}; let one machine alone "
                "run it"
            )

    @property
    def _own(self) -> str:
        """Return the holder that this working copy has had last; empty without one."""
        return self._file.read_text() if self._file.is_file() else ""

    def check_free(self, tell: Tell) -> str:
        """Return the text of the object that a run has left, after a look whether it changes; empty without one.

        Raises:
            ValueError: Another run is at work at the URL; names its process.
        """
        text = self._text()
        if text and _holder(text) != self._own:
            tell(
                {"message": f"{_holder(text)} ran at {self._store.url}; waiting {_SILENCE:g} s for a sign of its life"}
            )
            end = time.monotonic() + _SILENCE
            while text and time.monotonic() < end:
                time.sleep(_LOOK)
                before, text = text, self._text()
                if text not in ("", before):
                    self._refuse(text)
        return text

    def _take(self, holder: str, tell: Tell) -> None:
        """Write the object, after that of another run that has ended."""
        if self.check_free(tell):
            with self._store.errors("locked"), suppress(FileNotFoundError):
                self._store.files.rm_file(self._object)
        with self._store.errors("locked"):
            self._store.child(_NAME).make_parent()
        try:
            with suppress(FileExistsError):
                self._store.files.pipe_file(self._object, f"{holder}\n".encode(), mode="create")
        except Exception:  # no conditional writes, or no writes at all, of which the plain write raises the error
            if not self._text():
                self._write(holder)
        if _holder(text := self._text()) != holder:
            self._refuse(text)

    def _refuse(self, text: str) -> None:
        raise ValueError(f"{_holder(text)} runs at {self._store.url}; wait until it ends, or choose another out")

    def _beat(self, holder: str, ended: Event) -> None:
        for number in itertools.count(1):
            if ended.wait(_BEAT):
                return
            with suppress(Exception):  # the next upload tells of a store that cannot be reached
                if _holder(self._text()) in ("", holder):
                    self._write(holder, number)

    def _write(self, holder: str, number: int = 0) -> None:
        with self._store.errors("locked"):
            self._store.files.pipe_file(self._object, f"{holder}\n{number}".encode())

    def _text(self) -> str:
        """Return the text of the object; empty without one."""
        with self._store.errors("locked"):
            try:
                return str(self._store.files.cat_file(self._object).decode())
            except FileNotFoundError:
                return ""


def _holder(text: str) -> str:
    return text.partition("\n")[0]
