"""Where Triton comes from, and the one question that every layer asks: do kernels run on these tensors?

torch's CUDA builds bring Triton, its CPU builds do not. Kernel modules take `triton` and `tl` from here, so that they
can be imported without it; launching a kernel then raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


class _Absent:
    """Stands for `triton` and everything in it: good enough to define kernels, not to launch them."""

    def __getattr__(self, name: str) -> _Absent:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Absent:
        return self

    def __getitem__(self, grid: Any) -> _Absent:
        raise RuntimeError("this kernel needs Triton, which torch's CUDA builds bring: pip install triton")


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Absent()

HAS_TRITON = not isinstance(triton, _Absent)

__all__ = [
    "HAS_TRITON",
    "cdiv",
    "next_power_of_2",
    "num_multiprocessors",
    "on_its_device",
    "shared_memory",
    "tl",
    "triton",
    "use_triton",
]


def use_triton(*tensors: Tensor | None) -> bool:
    """Whether the Triton kernels take these tensors: all on CUDA, all fp32, fp16 or bf16, and Triton installed."""
    return HAS_TRITON and all(x is None or (x.is_cuda and x.dtype in _DTYPES) for x in tensors)


def on_its_device(launch: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Decorate a function that launches kernels: they run on the GPU of its first tensor.

    Triton launches on the current GPU, which is another one where a process spreads a model over several.
    """

    @functools.wraps(launch)
    def on_device(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return launch(x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return launch(x, *args, **kwargs)

    return on_device


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """How many blocks of threads `device` runs side by side, in units of its multiprocessors."""
    if device.type != "cuda":
        return 2  # Triton's interpreter: a few programs, so that each of them loops
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have on `device`."""
    if device.type != "cuda":
        return 64 * 1024  # Triton's interpreter has no limit
    properties = torch.cuda.get_device_properties(device)
    # ROCm builds know only what a program has without asking for more.
    limit: int = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return limit


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n (1 for n <= 1): the length of a tile that holds n elements."""
    return 1 << max(0, n - 1).bit_length()


def cdiv(n: int, size: int) -> int:
    """How many pieces of `size` cover n."""
    return -(-n // size)
