"""Exchanges of a decoding step's few tokens over symmetric memory, else by the group's collectives. No gradient."""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.device.gpus import gpu, on_gpu
from parallel_layers.distributed import async_collectives
from parallel_layers.kernels import peers
from parallel_layers.kernels.peers import BLOCKS, FLAG_BYTES, MAX_RANKS, exchange
from parallel_layers.kernels.rms_norm import supports_rms_norm
from parallel_layers.linear.symmetric_memory import PeerMemory, why_not_symmetric_memory
from parallel_layers.norm.rms import RMSNorm

HALF_BYTES = 4 * 2**20
"""The largest tensor that goes over symmetric memory; beyond it every rank would read too much."""

Kind = Literal["all-reduce", "reduce-scatter", "all-gather"]


class _Buffer:
    """The buffers of a group, and this rank's counts of calls."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.memory = PeerMemory(group, FLAG_BYTES + 2 * HALF_BYTES, device)
        self.memory.of(group.rank(), (FLAG_BYTES,), torch.uint8).zero_()
        self.counters = torch.zeros(BLOCKS, dtype=torch.int32, device=device)
        self.memory.barrier()


_buffers: WeakKeyDictionary[ProcessGroup, dict[torch.device, _Buffer]] = WeakKeyDictionary()


def exchange_few(x: Tensor, group: ProcessGroup, kind: Kind) -> Tensor:
    """Return the sum of x over the ranks, this rank's part of it along dim 0, or all x along dim 0.

    Sums are rounded once where symmetric memory serves: one kernel, which a CUDA graph can capture after a first call.
    Otherwise floating-point sums are taken by the group's collectives in at least fp32.
    """
    if takes(x, group):
        return _over_peers(x.contiguous(), group, kind)
    if kind == "all-gather":
        return async_collectives.all_gather(x, group)
    wide = x.to(async_collectives.sum_dtype(x))
    reduce = async_collectives.all_reduce if kind == "all-reduce" else async_collectives.reduce_scatter
    return reduce(wide, group).to(x.dtype)


def takes(x: Tensor, group: ProcessGroup) -> bool:
    """Return whether x goes over symmetric memory; the same on every rank, which all have x of one shape."""
    fits = on_gpu(x) and 0 < x.nbytes <= HALF_BYTES and group.size() <= MAX_RANKS
    return fits and why_not_symmetric_memory(group, x.device) is None


def _over_peers(x: Tensor, group: ProcessGroup, kind: Kind) -> Tensor:
    size = group.size()
    rows = {"all-reduce": len(x), "reduce-scatter": len(x) // size, "all-gather": len(x) * size}[kind]
    out = x.new_empty(rows, *x.shape[1:])
    exchange(x, out, kind, **_buffer(x, group))
    return out


def _buffer(x: Tensor, group: ProcessGroup) -> dict[str, Any]:
    """Return the arguments of a kernel for the group's buffers."""
    of_group = _buffers.setdefault(group, {})
    if x.device not in of_group:
        if gpu.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot map memory of other ranks; run the step once before capturing it")
        of_group[x.device] = _Buffer(group, x.device)
    buffer = of_group[x.device]
    return {
        "buffers": buffer.memory.addresses,
        "half_bytes": HALF_BYTES,
        "counters": buffer.counters,
        "rank": group.rank(),
        "ranks": group.size(),
    }


def sum_and_add(x: Tensor, residual: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks plus the residual, `[T, H]`: by one kernel, or as `exchange_few` sums.

    Both ways round the sum to x's dtype before the addition, and give the same bits on all ranks.
    """
    return _sum(x, residual, None, group)[1] if _fuses(x, residual, group) else residual + _total(x, group)


def sum_and_norm(x: Tensor, residual: Tensor, norm: RMSNorm, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return `(norm(s), s)` for `s = sum_and_add(x, residual, group)`, see `Norm.add_and_norm`."""
    if _fuses(x, residual, group) and supports_rms_norm(x, norm.weight, residual):
        return _sum(x, residual, norm, group)
    return RMSNorm.add_and_norm(norm, _total(x, group), residual)  # a view's method may be this function


def _total(x: Tensor, group: ProcessGroup) -> Tensor:
    return exchange_few(x, group, "all-reduce")


def _fuses(x: Tensor, residual: Tensor, group: ProcessGroup) -> bool:
    return takes(x, group) and residual.shape == x.shape and residual.dtype == x.dtype


def _sum(x: Tensor, residual: Tensor, norm: RMSNorm | None, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    normed = total if norm is None else torch.empty_like(total)
    peers.sum_and_norm(
        x.contiguous(), residual.contiguous(), None if norm is None else norm.weight.contiguous(), total, normed,
        eps=0.0 if norm is None else norm.eps, unit_offset=norm is not None and norm.unit_offset, **_buffer(x, group),
    )  # fmt: skip
    return normed, total
