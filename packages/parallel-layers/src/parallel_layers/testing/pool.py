"""A pool of ranks for tests that runs many functions on the same processes.

One child process imports torch and forks the ranks of all pools (`worker`). Each rank joins a default group over a
file store and waits for calls on its own pipe. The ranks end when the pool is closed and when this process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from parallel_layers.device.names import VISIBLE_DEVICES
from parallel_layers.testing import worker

# Packages that are slow to import; the server imports the ones that the caller has imported.
_PRELOAD = ("hypothesis", "pytest", "torch.distributed")
# After the first failure the other ranks are usually stuck in a collective; a rank with its own failure fails at once.
_GRACE_SECONDS = 2.0
# Imports of torch or a test file do not count towards the time limit of a call.
_START_SECONDS = 600.0
# Functions may keep groups, and a group keeps threads and a socket to each peer. Ranks in more groups are replaced.
_MOST_GROUPS = 250


class RankTimeout(TimeoutError):
    """A function did not return on every rank in time; the message shows where each late rank stood."""


class RankDied(RuntimeError):
    """A rank's process ended (a crash, an `os._exit`, the kernel's memory killer) instead of answering."""


@dataclass
class _ForkedProcess:
    """A child of this process with the methods of `subprocess.Popen` that the server needs."""

    pid: int
    _ended: bool = False

    def poll(self) -> int | None:
        """Return 0 if the process has ended."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait until the process has ended."""
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        self._ended = self._ended or os.waitpid(self.pid, options)[0] == self.pid
        return 0 if self._ended else None


class _Server:
    """The caller's side of `worker.serve`.

    Unlike the fork server of `multiprocessing`, the process imports more modules before later forks, and ends with
    all ranks when its caller is gone, ranks that hang included.
    """

    def __init__(self, backend: str, *, fork: bool = False) -> None:
        self._connection, child_end = Pipe()
        start = self._fork if fork else partial(self._spawn, backend)
        self.process: subprocess.Popen[bytes] | _ForkedProcess = start(child_end)
        child_end.close()
        self._asking = threading.Lock()
        atexit.register(self.close)

    def _spawn(self, backend: str, child_end: Connection[Any, Any]) -> subprocess.Popen[bytes]:
        serve = f"from parallel_layers.testing import worker; worker.serve({child_end.fileno()})"
        return subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {serve}"],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(backend),
        )

    def _fork(self, child_end: Connection[Any, Any]) -> _ForkedProcess:
        if process := os.fork():
            return _ForkedProcess(process)
        try:
            self._connection.close()  # else the server would never see the caller's end
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            worker.serve(child_end.fileno())
        finally:
            os._exit(0)  # without what the caller does when it exits

    def close(self) -> None:
        """End the process, and with it all ranks."""
        self._connection.close()
        self.process.wait()

    def ask(
        self, request: worker.Start | tuple[int, ...], pipes: Sequence[Connection[Any, Any]] = ()
    ) -> tuple[int, ...]:
        """Fork the ranks of a `Start`, or end ranks by their process ids; return the process ids."""
        with self._asking:
            try:
                self._connection.send(request)
                for pipe in pipes:
                    send_handle(self._connection, pipe.fileno(), self.process.pid)
                return self._connection.recv()
            except BaseException:
                # After an interrupt, a late answer would be taken for the answer to the next request.
                self.close()
                raise

    def end(self, processes: tuple[int, ...]) -> None:
        """End ranks and the processes that they have started; return when they are gone."""
        # Without the process there are no ranks: each rank ends with its connection.
        with contextlib.suppress(OSError, EOFError):
            self.ask(processes)


_servers: dict[str, _Server] = {}


def _server(backend: str) -> _Server:
    if backend not in _servers or _servers[backend].process.poll() is not None:
        _servers[backend] = _Server(backend)
    return _servers[backend]


def fork_server() -> None:
    """Fork the process that forks gloo ranks from this process, so that it need not import anything again.

    Without this call, a new Python process imports what the ranks need, which takes seconds. Call it early: once this
    process has computed gradients, started threads or touched CUDA, torch does not work on ranks forked from it.
    """
    if "gloo" not in _servers:
        _servers["gloo"] = _Server("gloo", fork=True)


def _environment(backend: str) -> dict[str, str]:
    # One thread a rank: the ranks share the machine's cores. On gloo the GPUs are hidden, because imports may touch
    # CUDA, which does not work after a fork.
    hidden = {VISIBLE_DEVICES: ""} if backend == "gloo" else {}
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | hidden


class RankPool(contextlib.AbstractContextManager["RankPool"]):
    """`world_size` ranks on this machine that run functions one after another.

    Args:
        world_size: Number of ranks; each call may use the first few of them.
        backend: `"gloo"` (CPU) or `"nccl"` (rank r computes on CUDA device r).
        timeout: Time limit of a call in seconds, unless the call has its own.
        preload: Packages that are slow to import. Ranks start with the packages that the caller has imported
            by then. For `"nccl"` no package whose import touches CUDA: CUDA does not work after a fork.

    The processes start with the first call. After a hang or a death they are killed, and the next call starts
    new processes. Use it as a context manager, or call `close`; ranks that still run when Python exits are ended then.
    """

    def __init__(
        self, world_size: int, *, backend: str = "gloo", timeout: float = 120.0, preload: Iterable[str] = ()
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be at least 1")
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend={backend!r} is not one of ['gloo', 'nccl']")
        if worker.this_rank is not None:
            raise RuntimeError(
                "a rank may not start ranks: put the code that starts them under `if __name__ == '__main__':`, "
                "because the ranks import this file to find their function"
            )
        self.world_size = world_size
        self.backend = backend
        self.timeout = timeout
        self.preload = tuple(preload)
        self._end = contextlib.ExitStack()
        self._connections: list[Connection[Any, Any]] = []

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
            fn: A function at the top level of a file, which need not be importable. The ranks find the function by the
                file and its qualified name.
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
            if not self._connections:
                self._start()
            for connection in self._connections[:world]:
                connection.send_bytes(call)
            answers = self._collect(world, self.timeout if timeout is None else timeout)
        except BaseException:
            # After a stuck or dead rank or an interrupt, the state of the others is unknown: start new ranks.
            self.close()
            raise
        if len(answers) < world or max(answer.groups for answer in answers.values()) > _MOST_GROUPS:
            self.close()
        if errors := [answer.value for _, answer in sorted(answers.items()) if answer.failed]:
            errors[0].__notes__ = [note for error in errors for note in error.__notes__]
            raise errors[0]
        return [answers[rank].value for rank in range(world)]

    def close(self) -> None:
        """End the ranks. Calling `run` again would start new ranks."""
        self._end.close()
        self._connections = []

    def _start(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        self._folder = Path(self._end.enter_context(folder))
        pipes = [Pipe() for _ in range(self.world_size)]
        packages = tuple(f"{package}." for package in (*_PRELOAD, *self.preload))
        modules = [name for name in tuple(sys.modules) if f"{name}.".startswith(packages)]
        surroundings = _environment(self.backend), sys.path, os.getcwd()
        server = _server(self.backend)
        start = worker.Start(self.world_size, self.backend, str(self._folder), modules, *surroundings)
        self._processes = server.ask(start, [child_end for _, child_end in pipes])
        for parent_end, child_end in pipes:
            child_end.close()
            self._end.enter_context(parent_end)
        self._connections = [parent_end for parent_end, _ in pipes]
        self._end.callback(server.end, self._processes)

    def _collect(self, world: int, timeout: float) -> dict[int, worker.Answer]:
        """Return the answers of all ranks; after an exception, of the ranks that ended soon."""
        answers: dict[int, worker.Answer] = {}
        missing = set(range(world))
        starting = set(missing)
        deadline = time.monotonic() + _START_SECONDS + timeout
        while missing:
            failed = any(answer.failed for answer in answers.values())
            if not starting:
                deadline = min(deadline, time.monotonic() + (_GRACE_SECONDS if failed else timeout))
            ready = wait([self._connections[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready and failed:
                break
            if not ready:
                raise RankTimeout(
                    f"rank(s) {sorted(missing)} of {world} did not return within {timeout:g} s\n{self._stacks(missing)}"
                )
            for rank in [rank for rank in missing if self._connections[rank] in ready]:
                try:
                    answer = pickle.loads(self._connections[rank].recv_bytes())
                except (EOFError, ConnectionError):
                    raise RankDied(f"the process of rank {rank} ended without an answer") from None
                starting.discard(rank)
                if answer is not None:
                    answers[rank] = answer
                    missing.discard(rank)
        return answers

    def _stacks(self, ranks: Iterable[int]) -> str:
        """Return where the threads of some ranks are."""
        for rank in ranks:
            os.kill(self._processes[rank], signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"rank {rank}:\n{(self._folder / f'stack{rank}').read_text()}" for rank in ranks)


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


@cache
def _shared() -> RankPool:
    pool = RankPool(4)
    atexit.register(pool.close)
    return pool


def shared_pool(*preload: str) -> RankPool:
    """Return the one pool of 4 gloo ranks of this process; it is closed at exit.

    Its ranks have the packages `preload` of all calls: after a call that names further packages, new ranks start.
    """
    pool = _shared()
    if further := set(preload).difference(pool.preload):
        pool.preload += tuple(sorted(further))
        pool.close()
    return pool
