"""A stand-in for the GPU that Megatron-Core 0.16 needs, so that it computes on a CPU over gloo.

Megatron-Core asks `torch.cuda` for the current device, for streams, events and random states, writes `device="cuda"`,
`.cuda()` and `pin_memory=True` into its code, and compares type strings with `"torch.cuda.FloatTensor"`. Within
`cpu_stand_in()` all of these mean the CPU. The stand-in changes process-wide state while it is entered, so only tests
and demonstrations may enter it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _Stream:
    """Stands for a CUDA stream or event of a device that finishes all work at once."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def wait_event(self, _: object) -> None: ...

    def wait(self, _: object = None) -> None: ...

    def record(self, _: object = None) -> None: ...

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0


def _names_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites the device in every torch call of the thread that entered it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func in (torch.Tensor.pin_memory, torch.Tensor.record_stream):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # "torch.FloatTensor" is what DistributedOptimizer would refuse.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs.pop("pin_memory", False):
            kwargs["pin_memory"] = False
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return func(*(_CPU if _names_cuda(argument) else argument for argument in args), **kwargs)


def _nothing() -> Callable[..., None]:
    # A new function each time: torch.compile looks up all names of torch.cuda and has rules by object.
    return lambda *_, **__: None


_CUDA: dict[str, Any] = {
    "is_available": lambda: False,
    "current_device": lambda: _CPU,
    "device_count": lambda: 1,
    "set_device": _nothing(),
    "synchronize": _nothing(),
    "empty_cache": _nothing(),
    "Stream": _Stream,
    "Event": _Stream,
    "current_stream": _Stream,
    "default_stream": _Stream,
    "stream": lambda _: contextlib.nullcontext(),
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    "manual_seed": torch.default_generator.manual_seed,
    "manual_seed_all": _nothing(),
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "memory_reserved": lambda *_: 0,
    "get_device_capability": lambda *_: (9, 0),
}
# The tracker's own accessors reach for CUDA's generators below torch.cuda.
_RANDOM: dict[str, Any] = {
    "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
    "_set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
}


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


# The dispatcher turns the split sizes of an all-to-all into numbers only if they come from a GPU.
_DISPATCHER: dict[str, Any] = {"maybe_move_tensor_to_cpu": _to_host}


# Without this, every rank would run a compiler to count the tokens of a router.
_ROUTER: dict[str, Any] = {"_apply_expert_bias": TopKRouter._apply_expert_bias._torchdynamo_orig_callable}


_all_gather = dist.all_gather
_reduce_scatter = dist.reduce_scatter


def _gather_uneven(outputs: list[Tensor], x: Tensor, group: dist.ProcessGroup | None = None, **options: Any) -> Any:
    rows = [len(output) for output in outputs] if x.dim() else []
    if len(set(rows)) < 2:
        return _all_gather(outputs, x, group=group, **options)
    padded = [output.new_empty(max(rows), *output.shape[1:]) for output in outputs]
    local = x.new_zeros(padded[0].shape)
    local[: len(x)] = x
    _all_gather(padded, local, group=group)
    for output, gathered in zip(outputs, padded, strict=True):
        output.copy_(gathered[: len(output)])
    return None


def _reduce_scatter_uneven(
    output: Tensor, parts: list[Tensor], *, group: dist.ProcessGroup | None = None, **options: Any
) -> Any:
    if len({part.shape for part in parts}) < 2:
        return _reduce_scatter(output, parts, group=group, **options)
    for rank, part in enumerate(parts):
        total = part.clone()
        dist.all_reduce(total, group=group)
        if rank == dist.get_rank(group):
            output.copy_(total)
    return None


class _Results:
    """A queue between processes, like Megatron-Core's; its process gets bytes, for which it needs no torch."""

    def __init__(self) -> None:
        self._queue = multiprocessing.get_context("spawn").Manager().Queue()

    def put(self, result: object) -> None:
        self._queue.put(pickle.dumps(result))

    def get_nowait(self) -> Any:
        return pickle.loads(self._queue.get_nowait())


@cache
def _results() -> _Results:
    return _Results()


# Without this, every rank that saves would start a process that imports torch. 0.17 and later made the name public.
_QUEUES: dict[str, Any] = {
    name: _results
    for name in ("_get_write_results_queue", "get_write_results_queue")
    if hasattr(filesystem_async, name)
}


# Sharded experts need collectives of parts of different sizes, which NCCL has and gloo lacks.
_COLLECTIVES: dict[str, Any] = {"all_gather": _gather_uneven, "reduce_scatter": _reduce_scatter_uneven}
_STAND_INS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.cuda, _CUDA),
    (megatron_random, _RANDOM),
    (token_dispatcher, _DISPATCHER),
    (TopKRouter, _ROUTER),
    (dist, _COLLECTIVES),
    (filesystem_async, _QUEUES),
)


@contextlib.contextmanager
def cpu_stand_in() -> Iterator[None]:
    """Run Megatron-Core on the CPU inside the block, and restore everything at its end.

    The stand-in works with any build of torch and ignores GPUs. Enter it before `megatron_grid`; it may be nested.
    """
    with contextlib.ExitStack() as stack:
        for module, stand_ins in _STAND_INS:
            for name, value in stand_ins.items():
                stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(_CudaMeansCpu())
        yield


@contextlib.contextmanager
def device_of(group: dist.ProcessGroup) -> Iterator[torch.device]:
    """Yield the device of a group's ranks: the GPU with NCCL, else the CPU inside the stand-in."""
    if dist.get_backend(group) == "nccl":
        yield torch.device("cuda", torch.cuda.current_device())
    else:
        with cpu_stand_in():
            yield _CPU


def stand_in_is_active() -> bool:
    """Return whether `cpu_stand_in` is entered."""
    return torch.cuda.current_device is _CUDA["current_device"]
