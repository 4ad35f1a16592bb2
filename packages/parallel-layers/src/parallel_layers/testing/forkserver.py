"""A process that has imported the slow modules and forks ranks in milliseconds.

Unlike the fork server of `multiprocessing`, this process imports more modules before later forks, ends ranks by process
group, and ends with all ranks when its caller is gone. It has one thread, so that forks are safe.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from parallel_layers.testing import worker

# Slow imports of test files, which every fork of the server shares.
_PRELOAD = (
    "hypothesis",
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
)


@dataclass(frozen=True)
class _Fork:
    """A request for ranks with the caller's present path, environment and folder; their sockets follow."""

    settings: worker.Settings
    preload: tuple[str, ...]
    path: tuple[str, ...]
    environment: dict[str, str]
    folder: str


class ForkServer:
    """The caller's side: starts the process, and asks for ranks and for their end.

    A request is a `_Fork`, or the process ids of ranks that shall end. The answer is the process ids of these ranks.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._socket, theirs = socket.socketpair()
        # The child gets the module search path of this process.
        start = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from parallel_layers.testing import forkserver; forkserver.serve({theirs.fileno()})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(backend),
        )
        theirs.close()
        self._asking = threading.Lock()
        self._connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        atexit.register(self.close)

    def close(self) -> None:
        """End the process, and with it all ranks."""
        self._connection.close()
        self._socket.close()
        self.process.wait()

    def fork(
        self, settings: worker.Settings, preload: Iterable[str]
    ) -> tuple[tuple[int, ...], list[Connection[Any, Any]]]:
        """Fork the ranks that `settings` describe; return their process ids and a connection to each.

        Before the fork, the server imports the modules of `preload` (names of packages) that this process has imported.
        """
        prefixes = tuple(f"{package}." for package in (*_PRELOAD, *preload))
        pairs = [socket.socketpair() for _ in range(settings.world_size)]
        loaded = tuple(name for name in tuple(sys.modules) if f"{name}.".startswith(prefixes))
        request = _Fork(settings, loaded, tuple(sys.path), _environment(self._backend), os.getcwd())
        processes = self._ask(request, [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        return processes, [Connection(ours.detach()) for ours, _ in pairs]

    def end(self, processes: tuple[int, ...]) -> None:
        """End ranks and the processes that they have started; return when they are gone."""
        # Without the process there are no ranks: each rank ends with its connection.
        with contextlib.suppress(OSError, EOFError):
            self._ask(processes)

    def _ask(self, request: _Fork | tuple[int, ...], descriptors: Sequence[int] = ()) -> tuple[int, ...]:
        with self._asking:
            try:
                self._connection.send(request)
                if descriptors:
                    socket.send_fds(self._socket, [b"s"], descriptors)
                return self._connection.recv()
            except BaseException:
                # After an interrupt, a late answer would be taken for the answer to the next request.
                self.close()
                raise


def fork_server(backend: str) -> ForkServer:
    """Return the fork server of this process for a backend; the first call starts it."""
    if _start(backend).process.poll() is not None:
        _start.cache_clear()
    return _start(backend)


@functools.cache
def _start(backend: str) -> ForkServer:
    return ForkServer(backend)


def _environment(backend: str) -> dict[str, str]:
    # One thread a rank: the ranks share the machine's cores.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if backend == "gloo":
        # Hide the GPUs: imports may touch CUDA, which does not work after a fork.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def serve(descriptor: int) -> None:
    """Run the process: answer requests from a socket until the other end closes, then end all ranks."""
    control = socket.socket(fileno=descriptor)
    connection: Connection[Any, Any] = Connection(os.dup(descriptor))
    living: set[tuple[int, ...]] = set()
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            break
        if isinstance(request, _Fork):
            _, descriptors, _, _ = socket.recv_fds(control, 1, request.settings.world_size)
            processes = _fork(request, descriptors, inherited=[control.fileno(), connection.fileno()])
            living.add(processes)
        else:
            processes = request
            _end(processes)
            living.discard(processes)
        connection.send(processes)
    for processes in living:
        _end(processes)


def _fork(request: _Fork, descriptors: list[int], inherited: list[int]) -> tuple[int, ...]:
    sys.path[:] = request.path
    os.environ.clear()
    os.environ.update(request.environment)
    for name in request.preload:
        # A rank that needs the module raises the error in its call.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Exclude imported modules from garbage collections, which are slow with them.
    gc.freeze()
    processes: list[int] = []
    for rank, mine in enumerate(descriptors):
        child = os.fork()
        # Both parent and child call it, because neither may go on before it is done.
        os.setpgid(child, processes[0] if processes else child)
        if child == 0:
            for other in [*inherited, *descriptors]:
                if other != mine:
                    os.close(other)
            os.chdir(request.folder)
            worker.serve(Connection(mine), rank, request.settings)
        processes.append(child)
    # Close our copies of the sockets, so that end-of-file reveals a dead rank.
    for mine in descriptors:
        os.close(mine)
    return tuple(processes)


def _end(processes: tuple[int, ...]) -> None:
    # The first rank's id is the id of the process group until all ranks are waited for.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(processes[0], signal.SIGKILL)
    for process in processes:
        os.waitpid(process, 0)
