"""`Machines`: the machines of a run that torchrun starts on each of them, and what they tell each other."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from rl_train.processes.errors import RankFailed

# Seconds between two looks at the other machines, and without a sign of life after which a machine is lost.
_LOOK_SECONDS, _SILENCE = 1.0, 60.0
# Seconds in which a shared file system shows a file to all machines.
_SEEN_SECONDS = 30.0
# Seconds to tell of an error where torchrun on the first machine may have ended.
_TELL_SECONDS = 10.0
_FAILED = "failed"


class Failure(NamedTuple):
    """The error of another machine; `mistake` says whether its text needs no traceback."""

    text: str
    mistake: bool

    @property
    def error(self) -> RankFailed:
        """Return the exception to raise here."""
        return RankFailed(self.text, self.text if self.mistake else None)


@dataclass(frozen=True)
class Machines:
    """The commands of one run, one or more on each machine; each starts an equal number of ranks.

    Attributes:
        rank: The number of this command.
        count: The number of commands; 1 without torchrun.
        local_rank, local_count: The same among the commands of this machine.
        address, port: Where torchrun's store listens, on the first machine.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    address: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def here(cls) -> Machines:
        """Return the machines that torchrun's variables name; without torchrun this machine alone."""
        if not dist.is_torchelastic_launched():
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, count, local_rank, local_count = (int(os.environ[name]) for name in names)
        return cls(rank, count, local_rank, local_count, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    @property
    def first(self) -> bool:
        """Say whether this command writes the files of the run and shows it."""
        return self.rank == 0

    def ranks(self, size: int) -> int:
        """Return the number of ranks of this command, for a grid of this size.

        Raises:
            ValueError: The commands do not divide the ranks.
        """
        if size % self.count:
            raise ValueError(
                f"{size} ranks do not divide into {self.count} equal parts, one for each command of torchrun; change "
                "--dims, or the number of machines"
            )
        return size // self.count

    def store(self, seconds: float = _SILENCE) -> Any:
        """Return a new connection to torchrun's store; not from before a restart by torchrun."""
        store = dist.TCPStore(  # type: ignore[attr-defined]
            self.address, self.port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        return prefixed(store, f"rl-train {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")

    @property
    def local_address(self) -> str:
        """Return the address from which this machine reaches the first one."""
        with socket.create_connection((self.address, self.port), _SILENCE) as connection:
            return str(connection.getsockname()[0])

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """Tell the other machines of an error inside, so that none of them waits."""
        try:
            yield
        except BaseException as error:
            if self.count > 1:
                text = getattr(error, "mistake", None) or str(error) or "was stopped"
                mistake = isinstance(error, (ValueError, OSError)) or getattr(error, "mistake", None) is not None
                where = f"machine {self.rank} ({socket.gethostname()}): "
                text = text if text.startswith("machine ") else where + text
                with suppress(RuntimeError):  # torchrun has ended on the first machine
                    self.store(_TELL_SECONDS).compare_set(_FAILED, "", json.dumps([text, mistake]))
            raise

    def agree(self, facts: Mapping[str, Any], mark: Path, seconds: float) -> None:
        """Wait for all machines; check that they have equal facts and see one folder.

        Args:
            facts: JSON values.
            mark: A file that the first machine has just written into the folder of the run.
            seconds: The time limit.

        Raises:
            ValueError: A machine has other facts, or its folder is another one; names both.
            RankFailed: A machine has failed, or did not come in time.
        """
        if self.count == 1:
            return
        store, deadline = self.store(), time.monotonic() + seconds
        if self.first:
            store.set("facts", json.dumps([facts, mark.read_text()]))
        first, text = json.loads(self._wait(store, "facts", seconds))
        facts = json.loads(json.dumps(facts))
        if different := [name for name in facts if facts[name] != first.get(name)]:
            values = ", ".join(f"{name}={facts[name]!r} here and {first.get(name)!r} there" for name in different)
            raise ValueError(f"differs from the first machine: {values}; start the same command, on the same files")
        deadline_of_folder = min(deadline, time.monotonic() + _SEEN_SECONDS)
        while not (mark.is_file() and mark.read_text() == text):
            if time.monotonic() > deadline_of_folder:
                raise ValueError(
                    f"{mark.parent.absolute()} is another folder than on the first machine; give an out on a file "
                    "system that all machines share"
                )
            time.sleep(0.1)
        store.set(f"agreed {self.rank}", "")
        for rank in range(self.count):
            self._wait(store, f"agreed {rank}", seconds)

    def _wait(self, store: Any, key: str, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        while not store.check([key]):
            if store.check([_FAILED]):
                raise Failure(*json.loads(store.get(_FAILED))).error
            if time.monotonic() > deadline:
                raise RankFailed(f"not all of the {self.count} commands of torchrun have come within {seconds:g} s")
            time.sleep(0.05)
        value: bytes = store.get(key)
        return value

    @contextmanager
    def watched(self, report: Callable[[Failure], None]) -> Iterator[str]:
        """Watch the other machines while the ranks run inside, and report the first error; yield a name for the ranks.

        A machine fails by telling so, by no sign of life within a minute, or with torchrun on the first machine.
        """
        if self.count == 1:
            yield ""
            return
        store, ended = self.store(), threading.Event()
        run = store.add(f"runs of {self.rank}", 1)
        watch = threading.Thread(target=self._watch, args=(store, run, ended, report), daemon=True)
        watch.start()
        try:
            yield f"ranks {run}"
        finally:
            ended.set()
            watch.join()
        with suppress(RuntimeError):  # torchrun has ended on the first machine
            store.set(f"done {run} {self.rank}", "")

    def _watch(self, store: Any, run: int, ended: threading.Event, report: Callable[[Failure], None]) -> None:
        signs = dict.fromkeys(range(self.count), (-1, time.monotonic()))
        try:
            while not ended.wait(_LOOK_SECONDS):
                if store.check([_FAILED]):
                    return report(Failure(*json.loads(store.get(_FAILED))))
                store.add(f"alive {run} {self.rank}", 1)
                for rank, (before, since) in signs.items():
                    sign, now = store.add(f"alive {run} {rank}", 0), time.monotonic()
                    if sign != before:
                        signs[rank] = sign, now
                    elif now - since > _SILENCE and not store.check([f"done {run} {rank}"]):
                        return report(Failure(f"machine {rank} gave no sign of life for {_SILENCE:g} s", False))
        except RuntimeError as error:
            if not ended.is_set():
                report(Failure(f"torchrun on the first machine, {self.address}:{self.port}, is lost: {error}", False))


def prefixed(store: Any, name: str) -> Any:
    """Return a store whose keys begin with a name."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
