"""The ranks' side of `RankPool`: join a group, then answer calls until the connection closes."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import io
import itertools
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn

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
    """The settings of all ranks of a pool; `folder` exists and is empty."""

    world_size: int
    backend: str
    folder: str

    def stack(self, rank: int) -> Path:
        """Return the file to which a rank writes where it is when it gets the signal SIGUSR1."""
        return Path(self.folder, f"stack{rank}")


@dataclass(frozen=True)
class Answer:
    """A rank's answer: a pickled result, or an exception and its traceback; `groups` counts its process groups."""

    kind: Literal["started", "returned", "raised"]
    payload: bytes = b""
    text: str = ""
    groups: int = 0


@dataclass(frozen=True)
class Call:
    """A call: the function's file, its module's name in the calling process, its qualified name, and the arguments."""

    file: str
    module: str
    qualname: str
    world: int
    # Pickled apart: arguments may be of classes that the file defines, so the rank loads the file first.
    arguments: bytes


def encode_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], world: int) -> bytes:
    """Return the message that asks a rank to call `fn`; raise ValueError if a rank could not find `fn`."""
    name = getattr(fn, "__qualname__", None)
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if not isinstance(name, str) or "<" in name or module is None or file is None:
        raise ValueError(f"{fn!r} must be a function at the top level of a file, so that the ranks can find it")
    return pickle.dumps(Call(os.path.abspath(file), module.__name__, name, world, _dumps((args, kwargs))))


def serve(connection: Connection[Any, Any], rank: int, settings: Settings) -> NoReturn:
    """Run a rank until the other end of the connection closes."""
    global _inside_a_rank
    _inside_a_rank = True
    stack = settings.stack(rank).open("w")
    faulthandler.register(signal.SIGUSR1, stack)
    groups: dict[int, dist.ProcessGroup] | BaseException
    try:
        groups = _join(rank, settings)
    except BaseException as error:
        groups = error
    while True:
        try:
            connection.send(_answer(connection, connection.recv(), groups))
        except (EOFError, OSError):
            os._exit(0)


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
        store=FileStore(os.path.join(settings.folder, "store"), world_size),
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


def _answer(
    connection: Connection[Any, Any], call: Call, groups: dict[int, dist.ProcessGroup] | BaseException
) -> Answer:
    try:
        if isinstance(groups, BaseException):
            raise groups
        fn = _find(call)
        args, kwargs = pickle.loads(call.arguments)
        connection.send(Answer("started"))
        # Every call starts from the same state, whatever ran before it.
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        return Answer("returned", _dumps(fn(groups[call.world], *args, **kwargs), detach=True), groups=_count_groups())
    except BaseException as error:
        payload = b""
        with contextlib.suppress(Exception):
            payload = pickle.dumps(error)
        return Answer("raised", payload, "".join(traceback.format_exception(error)), _count_groups())


def _count_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def _find(call: Call) -> Callable[..., Any]:
    value: Any = _load(call.file, call.module)
    for part in call.qualname.split("."):
        value = getattr(value, part)
    assert callable(value)
    return value


def _load(file: str, name: str) -> ModuleType:
    """Return the module of a file under its name in the calling process, so that pickled references resolve."""
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == file:
        return loaded
    # A script must not run its `if __name__ == "__main__"` part again here.
    own_name = "__mp_main__" if name == "__main__" else name
    if name != "__main__":
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(name)
            if found is not None and found.origin == file:
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


# Item size: a dtype whose tensors can be pickled; float8, unsigned and other dtypes cannot.
_PICKLED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class _Pickler(pickle.Pickler):
    """Pickles tensors of every dtype; with `detach` only their values, on the CPU."""

    def __init__(self, buffer: io.BytesIO, detach: bool) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._detach = detach

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        plain = type(obj) is torch.Tensor and obj.layout == torch.strided and not obj.is_quantized
        if plain and obj.dtype not in _PICKLED.values():
            same_bits = obj.detach().resolve_conj().view(_PICKLED[obj.itemsize])
            return _view, (same_bits, obj.dtype, obj.requires_grad and not self._detach)
        # The clone drops what a view's storage holds beyond the view.
        return obj.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL) if self._detach else NotImplemented


def _view(same_bits: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    """Return a tensor that was pickled in another dtype."""
    return same_bits.view(dtype).requires_grad_(requires_grad)


def _dumps(value: Any, *, detach: bool = False) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, detach).dump(value)
    return buffer.getvalue()
