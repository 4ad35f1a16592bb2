"""The processes behind `RankPool`: a server that forks ranks in milliseconds, and the ranks, which answer calls."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import importlib.util
import io
import itertools
import operator
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from parallel_layers.device.gpus import gpu, on_gpu
from parallel_layers.distributed.group_rendezvous import existing_groups

# The rank that this process is.
this_rank: int | None = None


@dataclass(frozen=True)
class Start:
    """A request for ranks; a pipe for each rank follows."""

    world_size: int
    backend: str
    folder: str  # exists and is empty; rank r writes where it is to stack{r} when it gets the signal SIGUSR1
    modules: list[str]  # imported before the fork
    environment: dict[str, str]
    path: list[str]
    working_folder: str


@dataclass(frozen=True)
class Answer:
    """A rank's result, or the exception that it raised; `groups` counts the rank's process groups."""

    value: Any
    failed: bool = False
    groups: int = 0


def encode_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], world: int) -> bytes:
    """Return the message that asks a rank to call `fn`; raise ValueError if a rank could not find `fn`."""
    name = getattr(fn, "__qualname__", None)
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if not isinstance(name, str) or "<" in name or module is None or file is None:
        raise ValueError(f"{fn!r} must be a function at the top level of a file, so that the ranks can find it")
    # Arguments may be of classes that the file defines, so the rank loads the file first.
    return pickle.dumps((os.path.abspath(file), module.__name__, name, world, _dumps((args, kwargs))))


def serve(descriptor: int) -> None:
    """Fork and end ranks as a socket asks, until its other end closes; then end all ranks.

    A request is a `Start`, or the process ids of ranks that shall end. The answer is the process ids of these ranks.
    """
    caller: Connection[Any, Any] = Connection(descriptor)
    living: set[tuple[int, ...]] = set()
    while True:
        try:
            request = caller.recv()
        except (EOFError, OSError):
            break
        if isinstance(request, Start):
            processes = _fork(request, caller)
            living.add(processes)
        else:
            processes = request
            _end(processes)
            living.discard(processes)
        caller.send(processes)
    for processes in living:
        _end(processes)


def _fork(start: Start, caller: Connection[Any, Any]) -> tuple[int, ...]:
    sys.path[:] = start.path
    os.environ.clear()
    os.environ.update(start.environment)
    gc.disable()
    for name in start.modules:
        # A rank that needs the module raises the error in its call.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Exclude imported modules from garbage collections, which are slow with them, and collect seldom.
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()
    processes: list[int] = []
    for rank in range(start.world_size):
        pipe = recv_handle(caller)
        child = os.fork()
        # Both parent and child call it, because neither may go on before it is done.
        os.setpgid(child, processes[0] if processes else child)
        if child == 0:
            caller.close()
            _run(Connection(pipe), rank, start)
        # Close our copy of the pipe before the next fork, so that end-of-file reveals a dead rank.
        os.close(pipe)
        processes.append(child)
    return tuple(processes)


def _end(processes: tuple[int, ...]) -> None:
    # The first rank's id is the id of the process group until all ranks are waited for.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(processes[0], signal.SIGKILL)
    for process in processes:
        os.waitpid(process, 0)


def _run(caller: Connection[Any, Any], rank: int, start: Start) -> NoReturn:
    """Run a rank until the other end of its pipe closes. It answers a call by None when it has found the function."""
    global this_rank
    this_rank = rank
    os.chdir(start.working_folder)
    stack = open(f"{start.folder}/stack{rank}", "w")  # noqa: SIM115 (open until the rank ends)
    faulthandler.register(signal.SIGUSR1, stack)
    groups: list[Any] | BaseException
    try:
        groups = _join(rank, start)
    except BaseException as error:
        groups = error
    with contextlib.suppress(EOFError, OSError):
        while True:
            answer = _answer(caller, caller.recv(), groups)
            caller.send_bytes(answer)
    os._exit(0)


def _join(rank: int, start: Start) -> list[Any]:
    """Join the default group, and form a group of the first n ranks for every n."""
    torch.set_num_threads(1)
    # All ranks are on this machine; the loopback device needs neither a network nor a resolvable host name.
    for loopback in {"lo", "lo0"}.intersection(name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    size = start.world_size
    if start.backend == "nccl":
        if (devices := gpu.device_count()) < size:
            raise ValueError(f"backend='nccl' with world_size={size} needs {size} CUDA devices, found {devices}")
        gpu.set_device(rank)
    _share_one_gloo_device()
    store = FileStore(f"{start.folder}/store", size)
    # The pool's own time limits are far shorter.
    timeout = datetime.timedelta(minutes=30)
    dist.init_process_group(start.backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return [dist.new_group(list(range(world))) for world in range(1, size + 1)]


def _share_one_gloo_device() -> None:
    """Have the gloo groups of this process use one device: a device's thread wakes up 100 times a second.

    A group that is made with explicit options keeps its device.
    """
    gloo: Any = dist.ProcessGroupGloo
    device, plain = gloo.create_default_device(), gloo.__init__

    def init(self: Any, store: Any, rank: int, size: int, options: Any = None, **limit: datetime.timedelta) -> None:
        if options is None:
            options = gloo._Options()
            options._devices, options._timeout = [device], limit["timeout"]
        plain(self, store, rank, size, options)

    gloo.__init__ = init


def _answer(caller: Connection[Any, Any], call: Any, groups: list[Any] | BaseException) -> bytes:
    file, module, name, world, arguments = call
    try:
        if isinstance(groups, BaseException):
            raise groups
        fn = operator.attrgetter(name)(_load(file, module))
        args, kwargs = pickle.loads(arguments)
        caller.send_bytes(pickle.dumps(None))
        # Every call starts from the same state, independent of earlier calls.
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        result = fn(groups[world - 1], *args, **kwargs)
        return _dumps(Answer(result, groups=len(existing_groups())), detach=True)
    except BaseException as error:
        reported = error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            # Not every exception survives pickling; the text always does.
            reported = RuntimeError("".join(traceback.format_exception_only(error)).strip())
        reported.add_note(f"on rank {this_rank}:\n" + "".join(traceback.format_exception(error)))
        return pickle.dumps(Answer(reported, failed=True))


def _load(file: str, name: str) -> ModuleType:
    """Return the module of a file under its name in the calling process, so that pickled references resolve."""
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == file:
        return loaded
    # A script must not run its `if __name__ == "__main__"` part again here.
    own_name = "__mp_main__" if name == "__main__" else name
    with contextlib.suppress(ImportError, ValueError):
        existing = importlib.util.find_spec(own_name)
        if existing is not None and existing.origin == file:
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(own_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own_name] = sys.modules[name] = module
    # pickle looks up `a.b.c` by importing `a` as well; test modules' packages are often mere names.
    for parent in itertools.accumulate(own_name.split(".")[:-1], "{}.{}".format):
        sys.modules.setdefault(parent, ModuleType(parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(own_name, None)
        sys.modules.pop(name, None)
        raise
    return module


class _Pickler(pickle.Pickler):
    """Pickles plain tensors of every dtype by their bytes; with `detach` only the values of tensors, on the CPU."""

    detach = False

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        x = obj.detach().cpu() if self.detach else obj
        if type(x) is not torch.Tensor or x.layout != torch.strided or x.is_quantized or on_gpu(x):
            return x.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        x = x.resolve_conj().resolve_neg()
        span = (
            1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        )
        return _tensor, (
            ctypes.string_at(x.data_ptr(), span * x.itemsize),
            x.dtype,
            x.shape,
            x.stride(),
            x.requires_grad,
        )


def _tensor(
    data: bytes, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    storage = torch.frombuffer(bytearray(data or b"0"), dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride).requires_grad_(requires_grad)


def _dumps(value: Any, *, detach: bool = False) -> bytes:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.detach = detach
    pickler.dump(value)
    return buffer.getvalue()
