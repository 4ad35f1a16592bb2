"""Exchanges of a decoding step's few tokens over symmetric memory, else by the group's collectives. No gradient."""

from __future__ import annotations

from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.kernels.peers import BLOCKS, FLAG_BYTES, MAX_RANKS, exchange
from parallel_layers.linear.symmetric_memory import PeerMemory, why_not_symmetric_memory

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
    fits = x.is_cuda and 0 < x.nbytes <= HALF_BYTES and group.size() <= MAX_RANKS
    return fits and why_not_symmetric_memory(group, x.device) is None


def _over_peers(x: Tensor, group: ProcessGroup, kind: Kind) -> Tensor:
    of_group = _buffers.setdefault(group, {})
    if x.device not in of_group:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot map memory of other ranks; run the step once before capturing it")
        of_group[x.device] = _Buffer(group, x.device)
    buffer, size = of_group[x.device], group.size()
    rows = {"all-reduce": len(x), "reduce-scatter": len(x) // size, "all-gather": len(x) * size}[kind]
    out = x.new_empty(rows, *x.shape[1:])
    exchange(
        x, out, kind, buffers=buffer.memory.addresses, half_bytes=HALF_BYTES, counters=buffer.counters,
        rank=group.rank(), ranks=size,
    )  # fmt: skip
    return out
