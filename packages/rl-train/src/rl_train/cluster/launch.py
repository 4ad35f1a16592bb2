"""Run a function on ranks of this machine, each in its own process; a failed rank ends all others."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt.cli import format_warning
from ckpt.files import REFUSALS
from parallel_layers import ParallelDims
from rl_train.cluster.kernels import keep_compiled_kernels

# Modules such as transformers ask for CUDA at import. With this variable torch asks NVML instead: a process that
# has initialised CUDA cannot be forked into ranks that use CUDA.
_CUDA_UNTOUCHED = "PYTORCH_NVML_BASED_CUDA_CHECK"

# Seconds to wait for reports of the other ranks after one rank has failed; then they are ended.
_GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class Devices:
    """The devices that ranks run on: torch's type, the backend of process groups, and the number (0 on the CPU)."""

    type: str
    backend: str
    count: int

    @classmethod
    def find(cls, device: str | None = None) -> Devices:
        """Return the devices of a type; None: an accelerator with collectives if torch finds one, else the CPU."""
        accelerator = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count()
        name = accelerator.type if accelerator is not None and count else None
        if device not in (None, "cpu", name):
            if device == "cuda":
                raise ValueError("device='cuda' was asked for, but torch finds no CUDA device")
            raise ValueError(
                f"device={device!r} must be cpu or cuda, or another accelerator that torch finds (here: {name})"
            )
        backend = dist.get_default_backend_for_device(name) if name else "gloo"
        # An accelerator without collectives, such as a Mac's, is used only on request.
        if name is None or device == "cpu" or (device is None and backend == "gloo"):
            return cls("cpu", "gloo", 0)
        return cls(name, backend, count)

    def take(self, device: str) -> torch.device:
        """Make the device with this id the current one; a process that sees only one device takes that device."""
        if self.type == "cpu":
            return torch.device("cpu")
        index = 0 if self.count == 1 else int(device) if device.isdecimal() else -1
        if not 0 <= index < self.count:
            raise ValueError(f"device {device!r} is not among the {self.count} {self.type} devices that torch sees")
        torch.accelerator.set_device_index(index)
        return torch.device(self.type, index)

    @property
    def current(self) -> torch.device:
        """Return the device of this process: the CPU, or the device that `take` has chosen."""
        if self.type == "cpu":
            return torch.device("cpu")
        return torch.device(self.type, torch.accelerator.current_device_index())

    def require(self, ranks: int) -> None:
        """Raise ValueError unless there is a device for each rank."""
        if self.type != "cpu" and ranks > self.count:
            what = f"{self.type.upper()} devices"
            raise ValueError(f"{ranks} ranks need as many {what}, found {self.count}; use --device cpu or fewer")


class RankFailed(RuntimeError):
    """A rank raised an exception, or its process ended (`died`); the message holds the traceback of the rank.

    `mistake` is the text of a ValueError or of a disk error, to show without a traceback; None for other errors.
    """

    def __init__(self, message: str, mistake: str | None = None, died: bool = False) -> None:
        super().__init__(message)
        self.mistake, self.died = mistake, died


@dataclass(frozen=True)
class _Setup:
    """The settings of a rank; `store` is a file, `connection` the pipe to the launcher."""

    rank: int
    world_size: int
    devices: Devices
    store: str
    collective_timeout: float
    connection: Connection


def prepare(*modules: str) -> None:
    """Start the server that forks all ranks; it imports these modules in the background. A second call does nothing.

    The server starts no threads and touches no device, so forking it is safe.
    """
    forkserver.set_forkserver_preload(list(modules))
    resource_tracker.ensure_running()  # else the server starts it, and unblocks Ctrl-C
    before = os.environ.get(_CUDA_UNTOUCHED)
    os.environ[_CUDA_UNTOUCHED] = "1"
    try:
        with _interrupts_blocked():
            forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[_CUDA_UNTOUCHED]
        else:
            os.environ[_CUDA_UNTOUCHED] = before


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in the processes that start inside, until they unblock it; this process gets it afterwards.

    A terminal sends Ctrl-C to all processes of a command. A process that is importing would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def slow_imports(dims: ParallelDims) -> list[str]:
    """Return the parts of torch that take a second or more to import and that the ranks of a grid need."""
    needed = {
        # torch imports torch._dynamo at the first operator written in Python, or the first optimizer.
        "torch._dynamo": True,
        "torch.distributed.fsdp": dims.dp * dims.cp > 1,
        "torch.distributed.pipelining": dims.pp > 1,
    }
    return [name for name, needs in needed.items() if needs]


def run_on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    devices: Devices | None = None,
    on_event: Callable[[Any], None] | None = None,
    collective_timeout: float = 1800.0,
) -> Any:
    """Call `fn(send, *args)` on `world_size` ranks of this machine, in a process group; return rank 0's result.

    Args:
        fn: A function at the top level of a module. `send(value)` passes a picklable value to `on_event` in this
            process while the ranks run.
        world_size: Number of ranks; rank r has CUDA device r or shares the CPU.
        *args: Picklable arguments.
        devices: The devices (default: `Devices.find()`).
        on_event: Called with each value that a rank sends.
        collective_timeout: Seconds after which a collective fails that some ranks have not reached.

    Raises:
        RankFailed: A rank raised or died. The others are ended within seconds.
        ValueError: There are fewer CUDA devices than ranks.
    """
    devices = devices or Devices.find()
    devices.require(world_size)
    prepare(fn.__module__)
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="rl-train-") as folder:
        processes: list[ForkServerProcess] = []
        connections: dict[Connection, int] = {}
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                setup = _Setup(rank, world_size, devices, str(Path(folder) / "store"), collective_timeout, theirs)
                process = context.Process(target=_rank, args=(setup, fn, args), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                connections[ours] = rank
            return _collect(connections, processes, on_event or (lambda event: None))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(
    connections: dict[Connection, int], processes: list[ForkServerProcess], on_event: Callable[[Any], None]
) -> Any:
    """Pass events on until every rank has returned, and return rank 0's result; raise if a rank fails."""
    failures: list[RankFailed] = []
    result: Any = None
    deadline = float("inf")
    while connections and time.monotonic() < deadline:
        for ready in wait(list(connections), timeout=min(1.0, max(0.0, deadline - time.monotonic()))):
            assert isinstance(ready, Connection)
            rank = connections[ready]
            try:
                kind, value = pickle.loads(ready.recv_bytes())
            except (EOFError, OSError):
                processes[rank].join(timeout=_GRACE_SECONDS)
                text = f"rank {rank} failed:\nits process ended with exit code {processes[rank].exitcode}"
                kind, value = "raised", RankFailed(text, died=True)
            if kind == "event":
                on_event(value)
                continue
            del connections[ready]
            if kind == "raised":
                failures.append(value)
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            elif rank == 0:
                result = value
    if failures:
        stopped = [_stopped(rank, processes[rank]) for rank in connections.values() if _is_stopped(processes[rank])]
        # Show a stopped process or a death, else a caller's mistake, else the first failure to arrive.
        raise min(stopped + failures, key=lambda failure: (not failure.died, failure.mistake is None))
    return result


def _is_stopped(process: ForkServerProcess) -> bool:
    """Say whether a process is stopped, as by SIGSTOP; always False except on Linux."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _stopped(rank: int, process: ForkServerProcess) -> RankFailed:
    text = (
        f"rank {rank} is stopped: process {process.pid} waits for SIGCONT, by a debugger, Ctrl-Z or SIGSTOP, and the "
        "other ranks waited for it"
    )
    return RankFailed(text, died=True)


def _rank(setup: _Setup, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # The launcher handles Ctrl-C and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()

    warnings.formatwarning = format_warning

    def send(kind: str, value: Any) -> None:
        setup.connection.send_bytes(pickle.dumps((kind, value)))

    try:
        keep_compiled_kernels()
        _join(setup)
        result = fn(lambda event: send("event", event), *args)
        send("returned", result if setup.rank == 0 else None)
    except BaseException as error:
        mistake = str(error) if _tells_the_user(error) else None
        if "Timed out waiting" in str(error):  # gloo's message; NCCL ends the process with its own message
            error.add_note(
                f"A collective waited collective_timeout={setup.collective_timeout:g} seconds for a rank that did not "
                "arrive; if ranks only take long (slow rewards, for example), raise the timeout"
            )
        with suppress(OSError):
            text = "".join(traceback.format_exception(error))
            send("raised", RankFailed(f"rank {setup.rank} failed:\n{text}", mistake))
    # The launcher ends this process. If the process exited by itself, working peers would lose their connections and
    # report that instead of the cause.
    sys.stdout.flush()
    sys.stderr.flush()
    while True:
        time.sleep(60)


def _tells_the_user(error: BaseException) -> bool:
    """Say whether an error needs no traceback: a ValueError, or a disk that refuses a file."""
    if isinstance(error, OSError):
        # ckpt's errors about a disk have no errno.
        return type(error) in (OSError, PermissionError) and error.errno in (None, *REFUSALS)
    return isinstance(error, ValueError)


def _end_with_the_launcher() -> None:
    """End this rank when the launcher has ended; the fork server cannot do that, because it lives as long as a rank."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _join(setup: _Setup) -> None:
    # All ranks are on this machine; the loopback device needs no network and no resolvable host name.
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    on_cpu = setup.devices.type == "cpu"
    device = setup.devices.take(str(setup.rank))
    # Without OMP_NUM_THREADS, every rank would use all cores.
    if on_cpu and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // setup.world_size))
    dist.init_process_group(
        setup.devices.backend,
        init_method=f"file://{setup.store}",
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=datetime.timedelta(seconds=setup.collective_timeout),
        device_id=None if on_cpu else device,
    )
