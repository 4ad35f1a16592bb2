"""Import of Triton, and the check whether kernels can run on given tensors.

torch's CUDA builds include Triton, its CPU builds do not. Kernel modules import `triton` and `tl` from here; without
Triton the import works and a launch raises RuntimeError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class _MissingTriton:
    """A stand-in for `triton` that can define kernels; a launch raises RuntimeError."""

    def __getattr__(self, name: str) -> _MissingTriton:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _MissingTriton:
        return self

    def __getitem__(self, grid: Any) -> _MissingTriton:
        raise RuntimeError("this kernel needs Triton; install a CUDA build of torch, or run: pip install triton")


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _MissingTriton()

HAS_TRITON = not isinstance(triton, _MissingTriton)

__all__ = ["HAS_TRITON", "tl", "triton"]  # `mypy` takes the imported names as exported


_planned_device: ContextVar[str] = ContextVar("planned_device", default="meta")


@contextmanager
def planned_for(device_type: Literal["cuda", "cpu"]) -> Iterator[None]:
    """Let tensors on the meta device choose the kernels of an H200 ("cuda") or of a CPU inside the block.

    All optional packages count as installed. A forward and a backward on the meta device then allocate what they would
    allocate on that device, so a machine without a GPU can plan the memory of a GPU.
    """
    token = _planned_device.set(device_type)
    try:
        yield
    finally:
        _planned_device.reset(token)


def planning() -> bool:
    """Return whether the code runs inside `planned_for`."""
    return _planned_device.get() != "meta"


def device_type(device: torch.device) -> str:
    """Return the type of the device whose kernels tensors on `device` take: for "meta" the type of `planned_for`."""
    return _planned_device.get() if device.type == "meta" else device.type


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of the GPU whose kernels tensors on `device` take; (0, 0): not of a GPU."""
    if device_type(device) != "cuda":
        return 0, 0
    return (9, 0) if device.type == "meta" else _capability(device)


_capability = functools.cache(torch.cuda.get_device_capability)


def has_triton(x: Tensor) -> bool:
    """Return whether Triton's kernels compute with `x`."""
    return device_type(x.device) == "cuda" and (HAS_TRITON or x.is_meta)


def use_triton(*tensors: Tensor | None) -> bool:
    """Return True if Triton is installed and all tensors are fp32, fp16 or bf16 on CUDA; None is skipped."""
    return all(
        x is None or (has_triton(x) and x.dtype in (torch.float32, torch.float16, torch.bfloat16)) for x in tensors
    )


class Kernel:
    """A kernel of Triton that Python launches, `kernel[grid](*arguments)`.

    A launch with a first tensor on the meta device does nothing, so that a plan of memory runs the code that allocates.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = triton.jit(function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the launch over a grid."""

        def launch(first: Tensor, *args: Any, **options: Any) -> None:
            if not first.is_meta:
                self.function[grid](first, *args, **options)

        return launch


def on_its_device(launch: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Decorate a function that launches kernels: make the GPU of its first tensor current, where Triton launches."""

    @functools.wraps(launch)
    def on_device(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return launch(x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return launch(x, *args, **kwargs)

    return on_device


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of `device`."""
    if device.type == "meta":
        return 132  # of an H200, see `planned_for`
    if device.type != "cuda":
        return 2  # few programs in Triton's interpreter, so that each walks several tiles
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory available to one program on `device`."""
    if device.type != "cuda":
        return 64 * 1024  # Triton's interpreter has no limit
    properties = torch.cuda.get_device_properties(device)
    # ROCm builds report no opt-in limit.
    limit: int = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return limit


def rows_of_program(rows: int, most: int, device: torch.device) -> int:
    """Return how many of `rows` a program takes: at most `most`, a power of two, and fewer while a GPU has room."""
    return min(most, next_power_of_2(cdiv(rows, num_multiprocessors(device))))


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def cdiv(n: int, size: int) -> int:
    """Return n / size, rounded up."""
    return -(-n // size)
