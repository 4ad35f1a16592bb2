"""Import of Triton, and the check whether kernels can run on given tensors.

torch's CUDA builds include Triton, its CPU builds do not. Kernel modules import `triton` and `tl` from here; without
Triton the import works and a launch raises RuntimeError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

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


def use_triton(*tensors: Tensor | None) -> bool:
    """Return True if Triton is installed and all tensors are fp32, fp16 or bf16 on CUDA; None is skipped."""
    return HAS_TRITON and all(
        x is None or (x.is_cuda and x.dtype in (torch.float32, torch.float16, torch.bfloat16)) for x in tensors
    )


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


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def cdiv(n: int, size: int) -> int:
    """Return n / size, rounded up."""
    return -(-n // size)
