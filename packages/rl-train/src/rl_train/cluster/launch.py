"""Run a function on ranks of this machine, each in its own process; a failed rank ends all others."""

from __future__ import annotations

import datetime
import math
import multiprocessing
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from ckpt.cli import format_warning
from ckpt.files import REFUSALS
from ckpt.transfer import agree_on_first
from parallel_layers.device import GPU
from rl_train.cluster.addresses import interface_of
from rl_train.cluster.fork_server import prepare
from rl_train.cluster.kernels import keep_compiled_kernels
from rl_train.cluster.machines import Failure, Machines, prefixed
from rl_train.processes.child import GPU_THREADS, Channel
from rl_train.processes.errors import ProcessLost, RankFailed, stopped
from rl_train.processes.host import Call, Process
from rl_train.processes.times import END_SECONDS, REPORT_SECONDS
from rl_train.processes.worker import Calls

# Instructions of CPUs for bfloat16, as `torch.cpu.get_capabilities` names them: two of x86, one of Arm.
_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")


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
            if device == GPU:
                raise ValueError("torch finds no CUDA device for device='cuda'; use cpu, or a CUDA build of torch")
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

    @property
    def has_bfloat16(self) -> bool:
        """Whether the devices multiply in bfloat16; a CPU without such instructions is several times slower in it."""
        capabilities = torch.cpu.get_capabilities()
        return self.type != "cpu" or any(capabilities.get(name) for name in _BFLOAT16)

    def join(self, device: torch.device, rank: int, world_size: int, seconds: float, **meeting: Any) -> None:
        """Join the default process group by a `store` or an `init_method`; collectives fail after `seconds`."""
        dist.init_process_group(
            self.backend,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=seconds),
            device_id=None if self.type == "cpu" else device,
            **meeting,
        )

    def require(self, ranks: int) -> None:
        """Raise ValueError unless there is a device for each rank of this machine."""
        if self.type != "cpu" and ranks > self.count:
            what = f"{self.type.upper()} devices"
            raise ValueError(f"{ranks} ranks need as many {what}, found {self.count}; use --device cpu or fewer")


def require_devices(device: str | None, ranks: int, devices: Devices | None = None) -> None:
    """Raise ValueError unless a run has a device for each rank: all of its `devices`, or those of this machine."""
    if devices is not None:
        devices.require(ranks)
    else:
        machines = Machines.here()
        Devices.find(device).require(machines.ranks(ranks) * machines.local_count)


@dataclass(frozen=True)
class _Setup:
    """The settings of a rank.

    `device` is its number among the `local_size` ranks of this machine. `store` is a file, or with several machines a
    name in torchrun's store.
    """

    rank: int
    world_size: int
    device: int
    local_size: int
    devices: Devices
    machines: Machines
    store: str
    collective_timeout: float


def run_on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    devices: Devices | None = None,
    on_event: Callable[[Any], None] | None = None,
    collective_timeout: float = 1800.0,
) -> Any:
    """Call `fn(send, *args)` on `world_size` ranks, in a process group; return rank 0's result, None on other machines.

    Under torchrun, each of its commands starts an equal part of the ranks (`Machines`).

    Args:
        fn: A function at the top level of a module. `send(value)` passes a picklable value to `on_event` in this
            process while the ranks run.
        world_size: Number of ranks; the r-th rank of a machine has CUDA device r or shares the CPU.
        *args: Picklable arguments.
        devices: The devices (default: `Devices.find()`).
        on_event: Called with each value that a rank sends.
        collective_timeout: Seconds after which a collective fails that some ranks have not reached.

    Raises:
        RankFailed: A rank raised or died. The others are ended within seconds.
        ValueError: There are fewer CUDA devices than ranks.
    """
    devices, machines = devices or Devices.find(), Machines.here()
    size = machines.ranks(world_size)
    start, local_size = machines.local_rank * size, machines.local_count * size
    devices.require(local_size)
    prepare(fn.__module__)
    messages: SimpleQueue[tuple[int, Any]] = SimpleQueue()

    def report(rank: int, message: Any) -> None:
        messages.put((rank, message))

    with (
        tempfile.TemporaryDirectory(prefix="rl-train-") as folder,
        machines.watched(partial(report, -1)) as name,
    ):
        store = name or str(Path(folder) / "store")
        forks: dict[int, _Fork] = {}
        try:
            for number in range(size):
                rank = machines.rank * size + number
                setup = _Setup(
                    rank, world_size, start + number, local_size, devices, machines, store, collective_timeout
                )
                forks[rank] = _Fork(setup)
                process = Process(f"rank {rank}", partial(forks.__getitem__, rank))
                process.start()
                call = process.submit("run", fn, args, on_part=partial(report, rank))
                call.add_done_callback(partial(report, rank))
            return _collect(messages, forks, on_event or (lambda event: None))
        finally:
            for fork in forks.values():
                fork.process.kill()
            for fork in forks.values():
                fork.end()


def _collect(
    messages: SimpleQueue[tuple[int, Any]], forks: Mapping[int, _Fork], on_event: Callable[[Any], None]
) -> Any:
    """Pass events on until the calls of all ranks are done, and return rank 0's result; raise if a rank fails."""
    failures: list[RankFailed] = []
    result: Any = None
    missing, deadline = set(forks), math.inf
    while missing:
        left = deadline - time.monotonic()
        try:
            rank, message = messages.get(timeout=None if left == math.inf else max(0.0, left))
        except queue.Empty:
            break
        if isinstance(message, Failure):
            failures.insert(0, message.error)
            break
        if not isinstance(message, Call):
            on_event(message)
            continue
        missing.discard(rank)
        if (error := message.exception()) is not None:
            failures.append(_failure(rank, message, error))
            deadline = min(deadline, time.monotonic() + REPORT_SECONDS)
        elif rank == 0:
            result = message.result()
    if failures:
        reasons = stopped({rank: forks[rank].process.pid for rank in sorted(missing)})
        failures = [*(RankFailed(f"rank {rank} {why}", died=True) for rank, why in reasons.items()), *failures]
        # Show a stopped process or a death, else a caller's mistake, else another machine's failure, else the first.
        raise min(failures, key=lambda failure: (not failure.died, failure.mistake is None))
    return result


def _failure(rank: int, call: Call, error: BaseException) -> RankFailed:
    if isinstance(error, ProcessLost):
        return RankFailed(f"rank {rank} {error.reason}", died=True)
    mistake = str(error) if _tells_the_user(error) else None
    return RankFailed(f"rank {rank} failed:\n{error if call.raised is None else call.raised.text}", mistake)


class _Fork(Channel):
    """The process of a rank, forked by the server of `prepare`."""

    def __init__(self, setup: _Setup) -> None:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=_rank, args=(theirs, setup), daemon=True)
        self.process.start()
        theirs.close()
        self._ends = threading.Lock()
        super().__init__(ours)

    def status(self) -> str:
        """See `Transport`."""
        with self._ends:
            self.process.join(END_SECONDS)
        return f"(exit status {self.process.exitcode})"

    def end(self) -> None:
        """See `Transport`."""
        self.process.kill()
        with self._ends:
            self.process.join()
        self.close()


def _rank(pipe: Connection, setup: _Setup) -> None:
    # The launcher handles Ctrl-C and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    warnings.formatwarning = format_warning
    keep_compiled_kernels()
    # The launcher ends this process. If the process exited by itself, working peers would lose their connections and
    # report that instead of the cause.
    for call in Calls(pipe):
        call.run(partial(_run, setup, call.part))


def _run(setup: _Setup, send: Callable[[Any], None], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call `fn` in the process group of all ranks, and return its result on rank 0."""
    try:
        _join(setup)
        result = fn(send, *args)
        return result if setup.rank == 0 else None
    except BaseException as error:
        if "Timed out waiting" in str(error):  # gloo's message; NCCL ends the process with its own message
            error.add_note(
                f"A collective waited collective_timeout={setup.collective_timeout:g} seconds for a rank that did not "
                "arrive; if ranks only take long (slow rewards, for example), raise the timeout"
            )
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


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


def from_first(make: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Call `make` on the first rank alone; return its value, which is pickled, or raise its error, on every rank."""
    values = [agree_on_first(make, group)]
    if group is not None:
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def _join(setup: _Setup) -> None:
    machines = setup.machines
    meeting: dict[str, Any] = {"init_method": f"file://{setup.store}"}
    if machines.count > 1:
        meeting = {"store": prefixed(machines.store(setup.collective_timeout), setup.store)}
        interface = interface_of(machines.local_address)
    else:
        # The loopback device needs no network and no resolvable host name.
        interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if machines.count == 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    device = setup.devices.take(str(setup.device))
    # Without OMP_NUM_THREADS, every rank would use all cores.
    if not os.environ.get("OMP_NUM_THREADS"):
        cores = max(1, (os.cpu_count() or 1) // setup.local_size)
        torch.set_num_threads(cores if device.type == "cpu" else min(cores, GPU_THREADS))
    setup.devices.join(device, setup.rank, setup.world_size, setup.collective_timeout, **meeting)
