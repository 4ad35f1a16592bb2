"""`Child`: a process of this machine behind a pipe, for code that may hang, fork, exit or leave processes behind.

Two processes start: the guard, and below it the worker. The guard ends all processes below it, in any session, when the
worker has ended, when `Child.end` is called, and when the process that owns the `Child` has ended.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import queue
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rl_train.processes.times import END_SECONDS

# Threads of torch in a process that computes on a GPU. The idle threads of such processes spin, and take the cores from
# the threads that start kernels.
GPU_THREADS = 2
# Options of Linux's prctl.
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


class Channel:
    """The caller's end of a pipe; no call waits for a process that is stopped in the middle of a message."""

    place = ""  # see `Transport`

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        # Wakes the threads at the end, even if a process that the guard does not see still holds the other end.
        self._socket = socket.socket(fileno=os.dup(pipe.fileno()))
        self._arrived, self._sent = queue.SimpleQueue[bytes | None](), queue.SimpleQueue[bytes | None]()
        self._writing = threading.Thread(target=self._write, daemon=True)
        self._writing.start()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message without waiting; after the process has ended, messages are dropped and `receive` raises."""
        self._sent.put(pickle.dumps(message))

    def receive(self, limit: float) -> Any:
        """Return the next message.

        Raises:
            TimeoutError: No message came within `limit` seconds.
            EOFError: The process has ended.
        """
        try:
            message = self._arrived.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError(f"no message for {limit:g} s") from None
        if message is None:
            self._arrived.put(None)
            raise EOFError("the process has ended")
        return pickle.loads(message)

    def close(self) -> None:
        """Close the pipe. Safe to call twice."""
        with suppress(OSError), self._socket:
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._arrived.put(self._pipe.recv_bytes())
        self._arrived.put(None)
        self._sent.put(None)
        self._writing.join()
        self._pipe.close()

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._sent.get()) is not None:
                self._pipe.send_bytes(message)


class Child(Channel):
    """A process that calls `module:function(connection)` in its own session, which Ctrl-C does not reach.

    The argument of the function is the other end of the pipe. The process imports from `path`, and has the environment
    of this process and `env`.
    """

    def __init__(self, function: str, *, path: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        ours, theirs = Pipe()
        program = f"from rl_train.processes.child import main; main({theirs.fileno()}, {function!r})"
        # The guard sees the end of this process as the end of its standard input.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,
        )
        # Close our copy of the end of the process, so that end-of-file reveals its death.
        theirs.close()
        super().__init__(ours)

    @property
    def pid(self) -> int:
        """Return the id of the guard's process; killing the guard also kills the worker."""
        return self._process.pid

    def status(self) -> str:
        """Return the exit status of a process that has ended, for messages."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        return f"(exit status {self._process.poll()})"

    def end(self) -> None:
        """Kill the process and all that it has started. Safe to call twice."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            self._process.kill()
            self._process.wait()
        self.close()


def main(pipe_end: int, function: str) -> None:
    """Start the work under a guard; the main function of the process."""
    os.set_inheritable(pipe_end, False)  # programs that the work starts shall not hold the pipe
    _guard(pipe_end)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(Connection(pipe_end))


@contextmanager
def forks_leave() -> Iterator[None]:
    """Call code of the user; a fork of this process that returns from it exits, as at the end of a program."""
    process, status = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() != process:
            status = _status_of(error)
        raise
    finally:
        if os.getpid() != process:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(status)


def _status_of(error: BaseException) -> int:
    """Return the exit status of a program that ends with an exception, and print what Python would print."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or 0) & 0xFF
    traceback.print_exception(error)
    return 1


def _guard(pipe_end: int) -> None:
    """Fork, and return in the worker. The guard waits for the end of the worker or of standard input, and ends all."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.close(woken)
        os.close(wake)
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        return
    os.close(pipe_end)
    events = select.poll()
    events.register(0, 0)  # reports that the other end was closed
    events.register(woken, select.POLLIN)
    status, goes_on = None, True
    while status is None and goes_on:
        ready = [place for place, _ in events.poll()]
        if woken in ready and signal.SIGTERM in os.read(woken, 4096):
            goes_on = False
        goes_on = goes_on and 0 not in ready
        status = _reap(worker)
    if not os.path.isdir("/proc"):
        with suppress(ProcessLookupError):
            os.killpg(worker, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS / 2
    while (children := _children()) and time.monotonic() < deadline:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
        ended = _reap(worker)
        status = ended if status is None else status
    _end_like(status or 0)


def _reap(worker: int) -> int | None:
    """Wait for the processes that have ended, and return the status of the worker if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while True:
            child, ended = os.waitpid(-1, os.WNOHANG)
            if child == worker:
                status = ended
            if child == 0:
                return status
    return status


def _children() -> list[int]:
    """Return the children of this process; as subreaper it adopts descendants whose parent has ended."""
    children = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The state and the parent follow the name in brackets, which may contain any character.
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    children.append(int(name))
    return children


def _end_like(status: int) -> None:
    """End this process with the status of the worker, without another core dump."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):  # only Linux has prctl
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
