"""Collectives as plain functions: no autograd, nothing changed in place, each split into a start and a `wait`.

They stand on torch's functional collectives, which torch.compile traces and which return at once: what is computed
between the start and `wait` overlaps with the communication. Every started collective must be waited for before its
result is read. All of them run on `gloo` with CPU tensors and on `nccl` with CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# Its functions keep the default group of the moment when it is first imported as a default argument. Other parts of
# torch import it late: after `init_process_group` it then holds that group for ever, and `destroy_process_group` leaves
# gloo's threads running.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import gloo_exit, gloo_gather

_ops = torch.ops._c10d_functional

# Some 4 microseconds of an H100 or H200, about what a kernel of another stream takes to follow an event.
_HEAD_START_CYCLES = 8000
# Sent over NVLink in some 25 microseconds.
_WORTH_A_HEAD_START = 8 * 2**20


def prepare_gloo() -> None:
    """Make gloo safe in this process: its gathers do not corrupt memory, and its threads rest before Python ends.

    Called where a CPU grid is built and where a collective of CPU tensors starts, not at import.
    """
    gloo_gather.install()
    gloo_exit.install()


def _contiguous(x: Tensor) -> Tensor:
    """Return `x` in one piece, ready to be sent."""
    if not torch.compiler.is_compiling() and x.is_cpu:
        prepare_gloo()
    return x.contiguous()


def is_sharded(group: ProcessGroup | None) -> bool:
    """Whether there is anybody to communicate with."""
    return group is not None and group.size() > 1


def sum_dtype(x: Tensor, reduce_dtype: torch.dtype | None = None) -> torch.dtype:
    """What a sum over the ranks is taken in: `reduce_dtype`, or by default at least fp32.

    A sum of n bf16 parts in bf16 rounds at each of its n - 1 steps; in fp32 only its result is rounded.
    """
    if reduce_dtype is not None:
        return reduce_dtype
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`: for what an `autograd.Function` returns.

    torch 2.11's compiler takes the gradient of a function that returns `x.to(x.dtype)` for zero, without a word.
    """
    return x if x.dtype == dtype else x.to(dtype)


def wait(x: Tensor) -> Tensor:
    """The result of a started collective, complete (on CUDA: for what is queued after this on the current stream)."""
    result: Tensor = _ops.wait_tensor(x)
    return result


def start_all_reduce(x: Tensor, group: ProcessGroup, op: str = "sum", *, owned: bool = False) -> Tensor:
    """Begin to reduce `x` over the group with `op` (`sum`, `max`, `min`, `product`, `avg`).

    `owned`: `x` is a temporary of the caller, who needs it no more; it may hold the result, which saves a copy.
    """
    # A compiler reuses buffers by itself, and better when nothing is changed in place.
    reduce = _ops.all_reduce_ if owned and not torch.compiler.is_compiling() else _ops.all_reduce
    result: Tensor = reduce(_contiguous(x), op, group.group_name)
    return result


def start_all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Begin to concatenate the ranks' `[n, ...]` along dim 0, in order of rank: `[size * n, ...]`."""
    result: Tensor = _ops.all_gather_into_tensor(_contiguous(x), group.size(), group.group_name)
    return result


def start_reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Begin to sum the ranks' `[size * n, ...]` and to keep this rank's `[n, ...]`.

    Raises:
        ValueError: Dim 0 does not divide by the group's size.
    """
    check_divisible(x, 0, group)
    result: Tensor = _ops.reduce_scatter_tensor(_contiguous(x), "sum", group.size(), group.group_name)
    return result


def start_reduce_scatter_into(out: Tensor, x: Tensor, group: ProcessGroup) -> dist.Work:
    """As `start_reduce_scatter`, into `out`, rows of a larger tensor, complete after `.wait()`. Eager only."""
    options = dist.ReduceScatterOptions()
    options.asyncOp = True  # on a stream of its own
    # What is under dist.reduce_scatter_tensor, whose name changes between torch's releases.
    return group._reduce_scatter_base(out, x, options)


def head_start(sent: Tensor) -> None:
    """On CUDA, let what was just started on another stream begin before the product that is queued next.

    A product takes every multiprocessor as soon as it may, and a kernel of another stream that is ready a moment later
    gets its own only when most of the product is done. So a large transfer, about as large as `sent`, is given that
    moment: the current stream is held for some microseconds. (Where all streams are put in one order by
    CUDA_DEVICE_MAX_CONNECTIONS=1, it is not needed; here nothing has to be set.)
    """
    if sent.is_cuda and not torch.compiler.is_compiling() and sent.nbytes >= _WORTH_A_HEAD_START:
        with torch.cuda.device(sent.device):
            torch.cuda._sleep(_HEAD_START_CYCLES)


def start_all_to_all(x: Tensor, group: ProcessGroup, output_sizes: Sequence[int], input_sizes: Sequence[int]) -> Tensor:
    """Begin to send `input_sizes[r]` rows to each rank r and to receive `output_sizes[r]` rows from it."""
    result: Tensor = _ops.all_to_all_single(_contiguous(x), list(output_sizes), list(input_sizes), group.group_name)
    return result


def all_reduce(x: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """`x` reduced over the group."""
    return wait(start_all_reduce(x, group, op))


def all_gather(x: Tensor, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """The ranks' tensors concatenated along `dim`, of which rank r has `sizes[r]` units; None: all of one shape.

    Parts of unequal sizes are sent as if each were as large as the largest.
    """
    if sizes is not None:
        padded = _padded(x, dim, max(sizes))
        parts = wait(start_all_gather(padded, group)).view(group.size(), *padded.shape)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)
    gathered = wait(start_all_gather(x, group))
    if dim % x.dim() == 0:
        return gathered
    return torch.cat(gathered.view(group.size(), *x.shape).unbind(), dim)


def reduce_scatter(x: Tensor, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part along `dim` of the ranks' sum: equal parts, or `sizes[r]` units for rank r.

    Parts of unequal sizes are sent as if each were as large as the largest.
    """
    if sizes is not None:
        blocks = torch.stack([_padded(part, dim, max(sizes)) for part in x.split(list(sizes), dim)])
        return wait(start_reduce_scatter(blocks, group)).squeeze(0).narrow(dim, 0, sizes[group.rank()])
    check_divisible(x, dim, group)
    if dim % x.dim() == 0:
        return wait(start_reduce_scatter(x, group))
    # One rank's part of dim becomes one block of dim 0.
    blocks = torch.stack(x.chunk(group.size(), dim))
    return wait(start_reduce_scatter(blocks, group)).squeeze(0)


def split(x: Tensor, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part of `x` along `dim`, in memory of its own; no communication. `sizes`: as in `reduce_scatter`."""
    if sizes is None:
        check_divisible(x, dim, group)
        sizes = [x.shape[dim] // group.size()] * group.size()
    first = sum(sizes[: group.rank()])
    return x.narrow(dim, first, sizes[group.rank()]).clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` with zeros behind it, so that it has `size` units of `dim`."""
    shape = list(x.shape)
    shape[dim] = size - shape[dim]
    return torch.cat((x, x.new_zeros(shape)), dim) if shape[dim] else x


def check_divisible(x: Tensor, dim: int, group: ProcessGroup) -> None:
    """Raise ValueError when `x` cannot be cut along `dim` into equal parts for the ranks of `group`."""
    if x.shape[dim] % group.size():
        raise ValueError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} is not divisible by the group's {group.size()} ranks; "
            "pad it (PackedSequence.from_sequences and pack take multiple_of)"
        )
