"""The ranks' side of `RankPool`: join a group, then answer calls until the connection closes."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.util
import io
import os
import pickle
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

BACKENDS = frozenset({"gloo", "nccl"})

# A collective that waits longer than this is given up by torch itself; the pool's own time limits are far shorter.
_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)

_inside_a_rank = False


def inside_a_rank() -> bool:
    """Return whether this process is a rank of a pool."""
    return _inside_a_rank


@dataclass(frozen=True)
class Settings:
    """The settings of all ranks of a pool; `store` is the path of a file that does not exist yet."""

    world_size: int
    backend: str
    store: str


@dataclass(frozen=True)
class Answer:
    """A rank's answer: a pickled result or exception, or a traceback as text; `groups` counts its process groups."""

    kind: Literal["ready", "started", "returned", "raised", "stack"]
    payload: bytes = b""
    text: str = ""
    groups: int = 0


@dataclass(frozen=True)
class _Location:
    """The place of a function: its file, the name of its module in the calling process, and its qualified name."""

    file: str
    module: str
    qualname: str


@dataclass(frozen=True)
class _Call:
    location: _Location
    world: int
    arguments: bytes


@dataclass(frozen=True)
class _StackRequest:
    pass


def encode_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], world: int) -> bytes:
    """Return the message that asks a rank to call `fn`; raise ValueError if a rank could not find `fn`."""
    name = getattr(fn, "__qualname__", None)
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if not isinstance(name, str) or "<" in name or module is None or file is None:
        raise ValueError(f"{fn!r} must be a function at the top level of a file, so that the ranks can find it")
    location = _Location(os.path.abspath(file), module.__name__, name)
    # Arguments are pickled apart: they may be of classes that the file defines, so the rank loads the file first.
    return pickle.dumps(_Call(location, world, _dumps((args, kwargs))))


def encode_stack_request() -> bytes:
    """Return the message that asks a rank for its traceback."""
    return pickle.dumps(_StackRequest())


class _Rank:
    """One rank: a thread receives messages while the main thread runs the calls."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection
        self.calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._main_thread = threading.get_ident()
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, answer: Answer) -> None:
        with self._sending:
            self.connection.send_bytes(pickle.dumps(answer))

    def _receive(self) -> None:
        while True:
            try:
                message = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                # The other side is gone. The main thread may be stuck in a collective: leave without it.
                os._exit(0)
            if isinstance(message, _StackRequest):
                frame = sys._current_frames().get(self._main_thread)
                self.send(Answer("stack", text="".join(traceback.format_stack(frame))))
            else:
                self.calls.put(message)


def serve(connection: Connection[Any, Any], rank: int, settings: Settings) -> None:
    """Run a rank until the other end of the connection closes."""
    global _inside_a_rank
    _inside_a_rank = True
    this = _Rank(connection)
    try:
        groups = _join(rank, settings)
    except BaseException as error:
        this.send(_raised(error))
        return
    this.send(Answer("ready"))
    while True:
        this.send(_answer(this, this.calls.get(), groups))


def _join(rank: int, settings: Settings) -> dict[int, dist.ProcessGroup]:
    """Join the default group, and form a group of the first n ranks for every n."""
    torch.set_num_threads(1)
    # All ranks are on this machine; the loopback device needs neither a network nor a resolvable host name.
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    world_size = settings.world_size
    if settings.backend == "nccl":
        devices = torch.cuda.device_count()
        if devices < world_size:
            raise ValueError(f"backend='nccl' with world_size={world_size} needs as many CUDA devices, found {devices}")
        torch.cuda.set_device(rank)
    dist.init_process_group(
        settings.backend,
        store=FileStore(settings.store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    groups = {}
    for world in range(1, world_size + 1):
        group = dist.new_group(list(range(world)))
        if rank < world:
            assert isinstance(group, dist.ProcessGroup)
            groups[world] = group
    return groups


def _answer(this: _Rank, call: _Call, groups: dict[int, dist.ProcessGroup]) -> Answer:
    try:
        fn = _find(call.location)
        args, kwargs = pickle.loads(call.arguments)
        this.send(Answer("started"))
        # Every call starts from the same state, whatever ran before it.
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        return Answer("returned", _dumps(fn(groups[call.world], *args, **kwargs), detach=True), groups=_count_groups())
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> Answer:
    text = "".join(traceback.format_exception(error))
    payload = b""
    with contextlib.suppress(Exception):
        payload = pickle.dumps(error)
    return Answer("raised", payload, text, _count_groups())


def _count_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def _find(location: _Location) -> Callable[..., Any]:
    value: Any = _load(location)
    for part in location.qualname.split("."):
        value = getattr(value, part)
    assert callable(value)
    return value


def _load(location: _Location) -> ModuleType:
    """Return the module of a file under its name in the calling process, so that pickled references resolve."""
    loaded = sys.modules.get(location.module)
    if loaded is not None and getattr(loaded, "__file__", None) == location.file:
        return loaded
    if location.module != "__main__":
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(location.module)
            if found is not None and found.origin == location.file:
                return importlib.import_module(location.module)
    # A script must not run its `if __name__ == "__main__"` part again here.
    name = "__mp_main__" if location.module == "__main__" else location.module
    spec = importlib.util.spec_from_file_location(name, location.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[location.module] = module
    # pickle looks up `a.b.c` by importing `a` as well; test modules' packages are often mere names.
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        parent = ".".join(parents[:depth])
        sys.modules.setdefault(parent, ModuleType(parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        sys.modules.pop(location.module, None)
        raise
    return module


# Dtypes whose tensors can be pickled; float8, unsigned and others cannot.
_PICKLED = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Pickler(pickle.Pickler):
    """Pickles tensors of every dtype; with `detach` only their values, on the CPU."""

    def __init__(self, buffer: io.BytesIO, detach: bool) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._detach = detach

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if self._detach:
            obj = obj.detach()
        plain = type(obj) is torch.Tensor and obj.layout == torch.strided and not obj.is_quantized
        if plain and obj.dtype not in _PICKLED:
            return _view, (obj.detach().view(_INTEGERS[obj.itemsize]), obj.dtype, obj.requires_grad)
        # The clone drops what a view's storage holds beyond the view.
        return obj.cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL) if self._detach else NotImplemented


def _view(integers: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    """Return a tensor that was pickled as integers of the same size."""
    return integers.view(dtype).requires_grad_(requires_grad)


def _dumps(value: Any, *, detach: bool = False) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, detach).dump(value)
    return buffer.getvalue()
