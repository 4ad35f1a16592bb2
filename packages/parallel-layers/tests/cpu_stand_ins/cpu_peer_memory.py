"""Symmetric memory on a CPU, of files that all ranks map, so that `overlap="symmetric-memory"` runs on one machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from random import Random
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from cpu_streams import CurrentStream, OtherStream
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.linear import symmetric_memory, transports


class _FileMemory:
    """`symmetric_memory.PeerMemory` of CPU tensors; a barrier is the group's own."""

    def __init__(self, group: ProcessGroup, num_bytes: int) -> None:
        self.group = group
        self.num_bytes = num_bytes
        handle, own = tempfile.mkstemp()
        os.close(handle)
        paths = [""] * group.size()
        try:
            os.truncate(own, num_bytes)
            dist.all_gather_object(paths, own, group=group)
            self._buffers = [torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8) for path in paths]
            self.barrier()
        finally:
            os.unlink(own)

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> Tensor:
        count = torch.Size(shape).numel()
        return self._buffers[rank][first * dtype.itemsize :][: count * dtype.itemsize].view(dtype).view(shape)

    def barrier(self) -> None:
        OtherStream.defer(lambda: dist.barrier(group=self.group))


@contextmanager
def peer_memory_on_cpu() -> Iterator[list[str]]:
    """Within it, ranks on CPUs have symmetric memory; which products over it were called: "gather", "scatter" or
    "scatter beside gather".

    Every rank of the groups that compute has to enter it. Streams beside the current one do what they are told at once
    or as late as they may, by chance, so that what is not waited for is missing. (The current stream is never late.)

    Raises:
        RuntimeError: At the end, something is left that nothing waited for.
    """
    memories: WeakKeyDictionary[ProcessGroup, _FileMemory] = WeakKeyDictionary()
    called: list[str] = []

    def peer_memory(group: ProcessGroup, num_bytes: int, device: torch.device) -> _FileMemory:
        memory = memories.get(group)
        if memory is None or memory.num_bytes < num_bytes:
            memory = memories[group] = _FileMemory(group, num_bytes)
        return memory

    def recorded(name: str, product: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(product)
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(f"{name} beside gather" if len(args) > 4 else name)
            return product(*args, **kwargs)

        return call

    chance = Random(0)
    streams = CurrentStream(), OtherStream(chance), OtherStream(chance)
    with (
        patch.object(symmetric_memory, "peer_memory", peer_memory),
        patch.object(symmetric_memory, "_streams", lambda device: streams),
        patch.object(transports, "why_not_symmetric_memory", lambda group, device: None),
        patch.object(transports, "gather_matmul", recorded("gather", symmetric_memory.gather_matmul)),
        patch.object(transports, "matmul_reduce_scatter", recorded("scatter", symmetric_memory.matmul_reduce_scatter)),
    ):
        yield called
    if left := streams[1].pending + streams[2].pending:
        raise RuntimeError(f"the current stream did not wait for {left} call(s) on streams beside it")
