"""A process that forks ranks. It has imported what they need, so new ranks cost milliseconds instead of an import each.

`multiprocessing`'s fork server would do nearly this, but it fixes what is imported before the first fork, and its
children may outlive it. This one imports more whenever its caller has, ends the ranks by process group, and ends with
them when its caller is gone, however that went. It is single-threaded, so that its forks are whole.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import pickle
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
    """Ask for ranks that see what the caller sees now; their sockets follow."""

    settings: worker.Settings
    preload: tuple[str, ...]
    path: tuple[str, ...]
    environment: dict[str, str]
    folder: str


@dataclass(frozen=True)
class _End:
    """Ask for the end of ranks, and of whatever they have started."""

    processes: tuple[int, ...]


class ForkServer:
    """The caller's side: start the process, ask it for ranks, ask it to end them."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        ours, theirs = socket.socketpair()
        # The child looks for modules where this process does, whatever way it was started.
        start = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from parallel_layers.testing import forkserver; forkserver.serve({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(backend),
        )
        theirs.close()
        self._socket = ours
        self._asking = threading.Lock()
        self._connection: Connection[Any, Any] = Connection(os.dup(ours.fileno()))
        atexit.register(self.close)

    @property
    def process(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process, and with it all ranks."""
        self._connection.close()
        self._socket.close()
        self._process.wait()

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
        """End ranks and whatever they have started; returns when they are gone."""
        # Without the process there are no ranks either: each ends when its connection does.
        with contextlib.suppress(OSError, EOFError):
            self._ask(_End(processes))

    def _ask(self, request: _Fork | _End, descriptors: Sequence[int] = ()) -> tuple[int, ...]:
        """The process ids that a request was about, when it is done."""
        with self._asking:
            try:
                self._connection.send_bytes(pickle.dumps(request))
                if descriptors:
                    socket.send_fds(self._socket, [b"s"], descriptors)
                processes: tuple[int, ...] = pickle.loads(self._connection.recv_bytes())
                return processes
            except BaseException:
                # An answer that came after an interrupt would be taken for that of the next request.
                self.close()
                raise


def fork_server(backend: str) -> ForkServer:
    """The one fork server of this process for a backend, started by the first call."""
    if not _start(backend).alive:
        _start.cache_clear()
    return _start(backend)


@functools.cache
def _start(backend: str) -> ForkServer:
    return ForkServer(backend)


def _environment(backend: str) -> dict[str, str]:
    # One thread a rank: the ranks share the machine's cores.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if backend == "gloo":
        # These ranks compute on the CPU; what they import may touch CUDA where it sees a device.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def serve(descriptor: int) -> None:
    """The process itself: answer requests from a socket until its other end is closed, then end all ranks."""
    control = socket.socket(fileno=descriptor)
    connection: Connection[Any, Any] = Connection(os.dup(descriptor))
    living: set[tuple[int, ...]] = set()
    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            break
        if isinstance(request, _End):
            processes = request.processes
            _end(processes)
            living.discard(processes)
        else:
            assert isinstance(request, _Fork)
            _, descriptors, _, _ = socket.recv_fds(control, 1, request.settings.world_size)
            processes = _fork(request, descriptors, inherited=[control.fileno(), connection.fileno()])
            living.add(processes)
        connection.send_bytes(pickle.dumps(processes))
    for processes in living:
        _end(processes)


def _fork(request: _Fork, descriptors: list[int], inherited: list[int]) -> tuple[int, ...]:
    sys.path[:] = request.path
    os.environ.clear()
    os.environ.update(request.environment)
    for name in request.preload:
        if name not in sys.modules:
            # A rank that needs the module will say in a call why it cannot be imported.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    # What was imported is no garbage: whole collections, which Megatron-Core asks for at every save, took 0.15 s of it.
    gc.freeze()
    processes: list[int] = []
    for rank, mine in enumerate(descriptors):
        child = os.fork()
        leader = processes[0] if processes else child
        # Parent and child both: neither may go on before it is done, and the second time changes nothing.
        os.setpgid(child, leader)
        if child == 0:
            for other in [*inherited, *descriptors]:
                if other != mine:
                    os.close(other)
            os.chdir(request.folder)
            worker.serve(Connection(mine), rank, request.settings)
            os._exit(0)
        processes.append(child)
    # Held open here, the ranks' ends would hide a rank's death from the other side.
    for mine in descriptors:
        os.close(mine)
    return tuple(processes)


def _end(processes: tuple[int, ...]) -> None:
    # The first rank's id is also the process group's; it stays theirs until they are waited for.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(processes[0], signal.SIGKILL)
    for process in processes:
        os.waitpid(process, 0)
