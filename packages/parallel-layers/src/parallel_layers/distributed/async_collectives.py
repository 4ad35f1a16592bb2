"""Collectives without autograd, each split into a start and a `wait`, on gloo (CPU) and NCCL (CUDA).

They call torch's functional collectives, which torch.compile can trace. Computation between start and `wait` overlaps
with the communication. Call `wait` before reading a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.distributed as dist

# Imported before any `init_process_group`: its functions take the default group of the import as a default argument.
# A later import would keep that group alive, and gloo's threads would outlive `destroy_process_group`.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.device.gpus import gpu, on_gpu
from parallel_layers.distributed.gloo import prepare_gloo

_ops = torch.ops._c10d_functional

# About 4 microseconds on an H100: the time that a kernel of another stream needs to start after an event.
_HEAD_START_CYCLES = 8000
# Bytes that NVLink sends in about 25 microseconds.
_WORTH_A_HEAD_START = 8 * 2**20


def _contiguous(x: Tensor) -> Tensor:
    """Return `x` in one piece, ready to be sent."""
    if not torch.compiler.is_compiling() and x.is_cpu:
        prepare_gloo()
    return x.contiguous()


def is_sharded(group: ProcessGroup | None) -> TypeGuard[ProcessGroup]:
    """Return whether the group has more than one rank."""
    return group is not None and group.size() > 1


def sum_dtype(x: Tensor, reduce_dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of a sum over the ranks: `reduce_dtype`, by default at least fp32, which rounds once."""
    if reduce_dtype is not None:
        return reduce_dtype
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype`; use it for results of an `autograd.Function`.

    The compiler of torch 2.11 silently gives zero gradients for a function that returns `x.to(x.dtype)`.
    """
    return x if x.dtype == dtype else x.to(dtype)


def wait(x: Tensor) -> Tensor:
    """Return the complete result of a started collective (on CUDA: complete for later work on the current stream)."""
    return _ops.wait_tensor(x)


def start_all_reduce(x: Tensor, group: ProcessGroup, op: str = "sum", *, owned: bool = False) -> Tensor:
    """Start an all-reduce of `x` with `op` (`sum`, `max`, ...). With `owned` the result may overwrite `x`."""
    # The compiler reuses buffers by itself.
    reduce = _ops.all_reduce_ if owned and not torch.compiler.is_compiling() else _ops.all_reduce
    return reduce(_contiguous(x), op, group.group_name)


def start_all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Start an all-gather along dim 0: `[n, ...]` -> `[size * n, ...]`, in order of rank."""
    return _ops.all_gather_into_tensor(_contiguous(x), group.size(), group.group_name)


def start_reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Start a reduce-scatter (sum) along dim 0: `[size * n, ...]` -> this rank's `[n, ...]`."""
    check_divisible(x, 0, group)
    return _ops.reduce_scatter_tensor(_contiguous(x), "sum", group.size(), group.group_name)


def start_reduce_scatter_into(out: Tensor, x: Tensor, group: ProcessGroup) -> dist.Work:
    """Start a reduce-scatter into `out`, complete after the work's `.wait()`; not for compiled code."""
    options = dist.ReduceScatterOptions()
    options.asyncOp = True  # on a separate stream
    # The group's own method: the public function has different names in different releases of torch.
    return group._reduce_scatter_base(out, x, options)


def head_start(message: Tensor) -> None:
    """Delay the current CUDA stream by some microseconds, so that a collective just started runs before the next GEMM.

    A GEMM occupies all SMs when it launches, so a collective that becomes ready a moment later would start late. The
    delay is for large transfers only. It does the work of the environment variable CUDA_DEVICE_MAX_CONNECTIONS=1.
    """
    if on_gpu(message) and not torch.compiler.is_compiling() and message.nbytes >= _WORTH_A_HEAD_START:
        with gpu.device(message.device):
            gpu._sleep(_HEAD_START_CYCLES)


def start_all_to_all(x: Tensor, group: ProcessGroup, output_sizes: Sequence[int], input_sizes: Sequence[int]) -> Tensor:
    """Start an all-to-all that sends `input_sizes[r]` rows to rank r and receives `output_sizes[r]` rows from it."""
    return _ops.all_to_all_single(_contiguous(x), list(output_sizes), list(input_sizes), group.group_name)


def all_reduce(x: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """Return `x` reduced over the group with `op`."""
    return wait(start_all_reduce(x, group, op))


def all_gather(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Return the ranks' tensors, of equal shapes, concatenated along `dim`."""
    gathered = wait(start_all_gather(x, group))
    if dim % x.dim() == 0:
        return gathered
    return torch.cat(gathered.view(group.size(), *x.shape).unbind(), dim)


def reduce_scatter(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Return this rank's equal part along `dim` of the sum over the ranks."""
    check_divisible(x, dim, group)
    if dim % x.dim() == 0:
        return wait(start_reduce_scatter(x, group))
    # Each rank's part of `dim` becomes one block of dim 0.
    blocks = torch.stack(x.chunk(group.size(), dim))
    return wait(start_reduce_scatter(blocks, group)).squeeze(0)


def split(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Return a copy of this rank's equal part of `x` along `dim`, without communication."""
    check_divisible(x, dim, group)
    size = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * size, size).clone(memory_format=torch.contiguous_format)


def check_divisible(x: Tensor, dim: int, group: ProcessGroup) -> None:
    """Raise ValueError if dim `dim` of `x` does not divide by the size of `group`."""
    if x.shape[dim] % group.size():
        raise ValueError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} is not divisible by the group's {group.size()} ranks; "
            "pad it (PackedSequence.from_sequences and pack take multiple_of)"
        )
