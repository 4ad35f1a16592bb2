"""A pool of ranks for tests that runs many functions on the same processes.

One child process imports torch and forks the ranks of all pools (`forkserver`). Each rank joins a default group over a
file store and waits for calls on its own socket. The ranks end when the pool is closed and when this process ends.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from parallel_layers.testing import worker
from parallel_layers.testing.forkserver import ForkServer, fork_server

# After the first failure the other ranks are usually stuck in a collective; ranks that fail themselves do so at once.
_GRACE_SECONDS = 2.0
# Imports of torch or a test file do not count towards the time limit of a call.
_START_SECONDS = 600.0
_STACK_SECONDS = 0.5
# A gloo group keeps threads and sockets, and functions may keep groups. Ranks in this many groups are replaced.
_MOST_GROUPS = 100


class RankTimeout(TimeoutError):
    """A function did not return on every rank in time; the message shows where each late rank stood."""


class RankDied(RuntimeError):
    """A rank's process ended (a crash, an `os._exit`, the kernel's memory killer) instead of answering."""


@dataclass
class _Ranks:
    """The running processes of a pool, and a connection to each."""

    server: ForkServer
    settings: worker.Settings
    processes: tuple[int, ...]
    connections: list[Connection[Any, Any]]
    folder: tempfile.TemporaryDirectory[str]

    @classmethod
    def start(cls, world_size: int, backend: str, preload: Iterable[str]) -> Self:
        """Fork the processes."""
        folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        server, settings = fork_server(backend), worker.Settings(world_size, backend, folder.name)
        return cls(server, settings, *server.fork(settings, preload), folder)

    def kill(self) -> None:
        """End every process of the pool and remove its folder."""
        self.server.end(self.processes)
        for connection in self.connections:
            connection.close()
        self.folder.cleanup()

    def receive(self, wanted: Iterable[int], timeout: float, *, first: bool = False) -> dict[int, worker.Answer]:
        """Return an answer from each wanted rank (with `first`: the first ones), or fewer when time is up."""
        answers: dict[int, worker.Answer] = {}
        missing = {self.connections[rank]: rank for rank in wanted}
        deadline = time.monotonic() + timeout
        while missing and not (first and answers):
            ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = missing.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    raise RankDied(f"the process of rank {rank} ended without an answer") from None
        return answers

    def stacks(self, ranks: Iterable[int]) -> str:
        """Return where the threads of some ranks are."""
        for rank in ranks:
            os.kill(self.processes[rank], signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        return "\n".join(f"rank {rank}:\n{self.settings.stack(rank).read_text()}" for rank in ranks)


class RankPool:
    """`world_size` ranks on this machine that run functions one after another.

    Args:
        world_size: Number of ranks; each call may use the first few of them.
        backend: `"gloo"` (CPU) or `"nccl"` (rank r computes on CUDA device r).
        timeout: Time limit of a call in seconds, unless the call has its own.
        preload: Packages that are slow to import. What the caller has imported of them when the ranks start, the ranks
            have, too. For `"nccl"` no package whose import touches CUDA: CUDA does not work after a fork.

    The processes start with the first call. After a hang or a death they are killed, and the next call starts
    new ones. Use it as a context manager, or call `close`; what is still open when Python exits is closed then.
    """

    def __init__(
        self, world_size: int, *, backend: str = "gloo", timeout: float = 120.0, preload: Iterable[str] = ()
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be at least 1")
        if backend not in worker.BACKENDS:
            raise ValueError(f"backend={backend!r} is not one of {sorted(worker.BACKENDS)}")
        if worker.inside_a_rank():
            raise RuntimeError(
                "a rank may not start ranks: put the code that starts them under `if __name__ == '__main__':`, "
                "because the ranks import this file to find their function"
            )
        self.world_size = world_size
        self.backend = backend
        self.timeout = timeout
        self.preload = frozenset(preload)
        self._ranks: _Ranks | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(group, *args, **kwargs)` on ranks 0..world-1 and return their results in order of rank.

        Args:
            fn: A function at the top level of a file. The ranks find it by that file and its qualified name, so the
                file needs to be neither a package's nor importable (test modules usually are not).
            *args: Picklable arguments, the same for every rank; tensors may be of every dtype.
            world: How many ranks take part; default all. `group` is a process group of exactly these.
            timeout: Seconds until the call counts as hung, once the ranks have loaded the function; default the pool's.
            **kwargs: Picklable keyword arguments.

        Returns:
            One result a rank; tensors in it come back detached and on the CPU.

        Raises:
            Exception: What the first failing rank raised, of the same type, with that rank's traceback as a note.
            RankTimeout: Not all ranks returned in time.
            RankDied: A rank's process ended.
        """
        world = self.world_size if world is None else world
        if not 1 <= world <= self.world_size:
            raise ValueError(f"world={world} is outside this pool's 1..{self.world_size} ranks")
        call = worker.encode_call(fn, args, kwargs, world)
        try:
            if self._ranks is None:
                self._ranks = _Ranks.start(self.world_size, self.backend, self.preload)
                self._finalizer = weakref.finalize(self, self._ranks.kill)
            for connection in self._ranks.connections[:world]:
                connection.send_bytes(call)
            answers = _collect(self._ranks, world, self.timeout if timeout is None else timeout)
        except BaseException:
            # After a stuck or dead rank or an interrupt, the state of the others is unknown: start new ranks.
            self.close()
            raise
        if len(answers) < world or max(answer.groups for answer in answers.values()) > _MOST_GROUPS:
            self.close()
        failures = {rank: answer for rank, answer in sorted(answers.items()) if answer.kind == "raised"}
        if failures:
            raise _as_exception(failures)
        return [pickle.loads(answers[rank].payload) for rank in range(world)]

    def close(self) -> None:
        """End the ranks. Calling `run` again would start new ones."""
        if self._finalizer is not None:
            self._finalizer()
        self._ranks = self._finalizer = None


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float = 120.0,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(group, *args, **kwargs)` on `world_size` new ranks and return their results; see `RankPool.run`."""
    with RankPool(world_size, backend=backend, timeout=timeout) as pool:
        return pool.run(fn, *args, **kwargs)


def shared_pool(preload: Iterable[str] = ()) -> RankPool:
    """Return the one pool of 4 gloo ranks of this process, which is closed when the process exits.

    The packages of `preload` are added to the pool's; new packages replace its ranks by new ones.
    """
    pool = _shared_pool()
    if not pool.preload.issuperset(preload):
        pool.close()
        pool.preload |= frozenset(preload)
    return pool


@functools.cache
def _shared_pool() -> RankPool:
    return RankPool(4)


def _collect(ranks: _Ranks, world: int, timeout: float) -> dict[int, worker.Answer]:
    """Return the answers of all ranks; after an exception, of the ranks that ended soon."""
    started = ranks.receive(range(world), _START_SECONDS)
    answers = {rank: answer for rank, answer in started.items() if answer.kind == "raised"}
    deadline = time.monotonic() + timeout
    while missing := [rank for rank in range(world) if rank not in answers]:
        if any(answer.kind == "raised" for answer in answers.values()):
            return answers | ranks.receive(missing, _GRACE_SECONDS)
        new = ranks.receive(missing, deadline - time.monotonic(), first=True)
        if not new:
            raise RankTimeout(
                f"rank(s) {missing} of {world} did not return within {timeout:g} s\n{ranks.stacks(missing)}"
            )
        answers |= new
    return answers


def _as_exception(failures: dict[int, worker.Answer]) -> Exception:
    """Return the exception of the lowest failing rank, with the traceback of every failing rank as a note."""
    first = next(iter(failures.values()))
    try:
        error = pickle.loads(first.payload)
    except Exception:
        # Not every exception survives pickling; the text always does.
        error = RuntimeError(first.text.strip().splitlines()[-1])
    for rank, answer in failures.items():
        error.add_note(f"on rank {rank}:\n{answer.text}")
    return error
