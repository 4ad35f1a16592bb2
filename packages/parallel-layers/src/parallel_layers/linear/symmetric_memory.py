"""GEMMs that overlap with their gather or scatter, over memory that the ranks' GPUs map from each other.

A gather copies this rank's tokens to the other ranks' memory by the GPU's copy engines, while the GEMM of this rank's
own tokens runs; the other ranks' tokens are multiplied as they arrive. A scatter multiplies the other ranks' tokens
first, sends each rank its results during the next GEMM, and sums the parts that it received. GEMMs run on two streams,
so that a GEMM fills the SMs that the last wave of the other GEMM leaves idle.

The GPUs of the group need peer access to each other (NVLink), and no multicast. Where a GPU reports multicast but its
driver or container refuses it, torch maps the memory only with TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in the environment.

Each call begins with a barrier, and a rank writes to other ranks' memory only after the barrier: every GPU has then
reached this call, and has read the results of the last call. So the calls of a group belong on one stream, in the same
order on every rank. The memory holds one activation of all tokens, or two for a gather and a scatter at once. Buffers
and barriers come from torch's symmetric memory.

Shape suffixes: T tokens, I input features, O output features, of which this rank has `T/tp`, `I/tp` or `O/tp`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.device.gpus import gpu
from parallel_layers.device.names import GPU
from parallel_layers.distributed import async_collectives
from parallel_layers.distributed.parallel_dims import time_limit
from parallel_layers.kernels.sum import sum_parts
from parallel_layers.linear.products import multiply_into

_TIMEOUT = timedelta(minutes=10)
"""A GPU's wait at a barrier for the others, where the group has no timeout: NCCL's default."""


class PeerMemory:
    """A buffer of the same size on every rank of a group, which all ranks map; every rank makes a `PeerMemory`.

    Raises:
        RuntimeError: torch cannot map the memory.
    """

    def __init__(self, group: ProcessGroup, num_bytes: int, device: torch.device) -> None:
        # torch.distributed._symmetric_memory.empty may take memory from a pool of torch's; this never does.
        from torch._C._distributed_c10d import _SymmetricMemory

        self.num_bytes = num_bytes
        self._timeout_ms = (time_limit(group) or _TIMEOUT) // timedelta(milliseconds=1)
        self._buffer = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self._handle = _SymmetricMemory.rendezvous(self._buffer, group.group_name)

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Return a rank's buffer from element `offset` of `dtype` on, as a tensor on this rank's device."""
        view: Tensor = self._handle.get_buffer(rank, shape, dtype, offset)
        return view

    @property
    def addresses(self) -> int:
        """The address on this rank's device of the ranks' addresses of their buffers there."""
        found: int = self._handle.buffer_ptrs_dev
        return found

    def barrier(self) -> None:
        """Make the current stream wait until every rank's stream has reached its barrier, and its writes have arrived.

        When another rank does not come within the group's timeout, the kernel traps and the process loses its GPU.
        """
        self._handle.barrier(0, self._timeout_ms)


_memories: WeakKeyDictionary[ProcessGroup, dict[torch.device, PeerMemory]] = WeakKeyDictionary()
_in_graphs: WeakKeyDictionary[ProcessGroup, set[PeerMemory]] = WeakKeyDictionary()
"""Memory that captured CUDA graphs use, also after larger memory has taken its place."""


def peer_memory(group: ProcessGroup, num_bytes: int, device: torch.device) -> PeerMemory:
    """Return the group's memory of at least `num_bytes`; every rank asks for the same size, in the same order.

    The memory lives as long as the group. When it grows, the ranks exchange handles, and the host waits for the GPU.

    Raises:
        RuntimeError: A CUDA graph is being captured, and the memory is smaller. Or torch cannot map the memory; when
            one rank alone cannot (its GPU is full), the others wait for it until the store's timeout.
    """
    memories = _memories.setdefault(group, {})
    memory = memories.get(device)
    capturing = gpu.is_current_stream_capturing()
    if memory is None or memory.num_bytes < num_bytes:
        if capturing:
            raise RuntimeError(
                f"a CUDA graph cannot allocate the {num_bytes} bytes that the ranks map of each other; run the "
                "function once before capturing it"
            )
        gpu.synchronize(device)  # the old memory may still be in use
        memory = None
        memories.pop(device, None)
        gpu.empty_cache()  # torch's allocator keeps free memory, and this memory comes from elsewhere
        memory = memories[device] = PeerMemory(group, num_bytes, device)
    if capturing:
        _in_graphs.setdefault(group, set()).add(memory)
    return memory


def gather_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, *, keep: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `all_gather(x) W^T + b` and `all_gather(x)`, which is valid until the group's next call.

    Without `keep`, `all_gather(x)` lacks this rank's own tokens.

    x `[T/tp, ..., I]`, weight `[O/tp, I]`, bias `[O/tp]` -> `[T, ..., O/tp]` and `[T, ..., I]`.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    size, rank = group.size(), group.rank()
    shape = (size, *rows.shape)
    memory = peer_memory(group, size * rows.nbytes, x.device)
    received = memory.of(rank, shape, x.dtype)
    y = rows.new_empty(size, len(rows), weight.shape[0])
    main, side, copies = _streams(x.device)

    copies.wait_stream(main)
    arrivals = []
    with copies:
        memory.barrier()
        for step in range(1, size):
            memory.of((rank + step) % size, shape, x.dtype)[rank].copy_(rows)
            memory.barrier()
            arrivals.append(((rank - step) % size, copies.record_event()))
        if keep:
            received[rank].copy_(rows)
    side.wait_stream(main)
    async_collectives.head_start(rows)
    multiply_into(y[rank], rows, weight, bias)
    for stream, arriving in ((side, arrivals[::2]), (main, arrivals[1::2])):
        with stream:
            for source, arrived in arriving:
                stream.wait_event(arrived)
                multiply_into(y[source], received[source], weight, bias)
    main.wait_stream(side)
    main.wait_stream(copies)
    return y.view(size * len(x), *x.shape[1:-1], -1), received.view(size * len(x), *x.shape[1:])


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    beside: Tensor | None = None,
    use: Callable[[Tensor], Any] = lambda gathered: None,
) -> tuple[Tensor, Any]:
    """Return `reduce_scatter(x W^T) + b`, and `use(all_gather(beside))`; the gather is valid until `use` returns.

    x `[T, ..., I/tp]`, weight `[O, I/tp]`, bias `[O]` -> `[T/tp, ..., O]`; beside `[T/tp, ..., O]`, gathered
    `[T, ..., O]`. The ranks' parts are rounded to x's dtype, then summed in fp32 and rounded once. The gather runs
    under the GEMMs of x. The ranks send each other their results under `use`.
    """
    async_collectives.check_divisible(x, 0, group)
    size, rank = group.size(), group.rank()
    blocks = x.reshape(size, -1, x.shape[-1])
    shape = (size, blocks.shape[1], len(weight))
    rows = None if beside is None else beside.reshape(shape[1:]).contiguous()
    offset = 0 if rows is None else math.prod(shape)  # of the results, which lie after the gathered tokens
    memory = peer_memory(group, (offset + math.prod(shape)) * x.element_size(), x.device)
    gathered, received = memory.of(rank, shape, x.dtype), memory.of(rank, shape, x.dtype, offset)
    outgoing = blocks.new_empty(size - 1, *shape[1:])  # other streams read it until the function returns
    peers = [(rank + step) % size for step in range(1, size)]
    main, side, copies = _streams(x.device)

    copies.wait_stream(main)
    side.wait_stream(main)
    with copies:
        memory.barrier()
        if rows is not None:
            for peer in peers:
                memory.of(peer, shape, x.dtype)[rank].copy_(rows)
            memory.barrier()
            arrived = copies.record_event()
    if rows is not None:
        gathered[rank].copy_(rows)
    bias = bias if rank == 0 else None
    finished = []
    with side:
        for peer, sending in zip(peers, outgoing, strict=True):
            multiply_into(sending, blocks[peer], weight, bias)
            finished.append(side.record_event())
    with copies:
        for peer, sending, ready in zip(peers, outgoing, finished, strict=True):
            copies.wait_event(ready)
            memory.of(peer, shape, x.dtype, offset)[rank].copy_(sending)
    async_collectives.head_start(blocks)  # to the results that other ranks wait for
    multiply_into(received[rank], blocks[rank], weight, bias)
    with copies:
        memory.barrier()
    used = None
    if beside is not None:
        main.wait_event(arrived)
        used = use(gathered.view(len(x), *beside.shape[1:]))
    main.wait_stream(copies)
    return sum_parts(received).view(len(x) // size, *x.shape[1:-1], -1), used


def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream, torch.Stream]:
    """Return the current stream, and two with priority, for GEMMs and for copies, because other ranks wait for them."""
    return torch.accelerator.current_stream(device), *_streams_of(device)


@functools.cache
def _streams_of(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    return torch.Stream(device, priority=-1), torch.Stream(device, priority=-1)


_reasons: WeakKeyDictionary[ProcessGroup, dict[torch.device, str | None]] = WeakKeyDictionary()


def why_not_symmetric_memory(group: ProcessGroup | None, device: torch.device) -> str | None:
    """Return why the ranks of `group` cannot use these GEMMs on `device`; None when they can.

    Every rank calls this, and either all ranks get a reason or none. Communication, on CUDA, once for each group and
    device: an all-gather and two all-reduces of a few bytes, and the exchange of a handle.
    """
    if group is None or not async_collectives.is_sharded(group):
        return "one rank has nothing to send"
    if device.type != GPU:
        return f"it needs CUDA devices, not {device.type}"
    reasons = _reasons.setdefault(group, {})
    if device not in reasons:
        index = gpu.current_device() if device.index is None else device.index
        reasons[device] = _why_not_linked(group, device, index)
    return reasons[device]


def _why_not_linked(group: ProcessGroup, device: torch.device, index: int) -> str | None:
    ids = [_gpu_id(i) for i in range(gpu.device_count())]
    gathered = async_collectives.all_gather(
        torch.tensor(list(ids[index]), dtype=torch.uint8, device=device)[None], group
    )
    peers = [bytes(row) for row in gathered.tolist()]
    reason = _agree(why_not_peers(index, ids, peers, gpu.can_device_access_peer), group, device)
    return reason or _agree(_why_not_mapped(group, device), group, device)


def why_not_peers(
    own: int, visible: Sequence[bytes], peers: Sequence[bytes], can_access: Callable[[int, int], bool]
) -> str | None:
    """Return why GPU `own` cannot reach all of `peers`, by the ids of the GPUs `visible` here; None when it can."""
    for rank, peer in enumerate(peers):
        if peer not in visible:
            return (
                f"the GPU of rank {rank} is on another host or hidden from this process, which therefore cannot ask "
                "for peer access (if it is hidden: let each process see all GPUs of the host)"
            )
        index = visible.index(peer)
        if index != own and not can_access(own, index):
            return f"GPU {own} has no peer access to GPU {index} (rank {rank}): they are not linked by NVLink"
    return None


def _gpu_id(index: int) -> bytes:
    """Return an id that is the same in every process that sees the GPU, and has a fixed length."""
    return sha256(str(gpu.get_device_properties(index).uuid).encode()).digest()


def _why_not_mapped(group: ProcessGroup, device: torch.device) -> str | None:
    try:
        PeerMemory(group, 1024, device)
    except (ImportError, RuntimeError) as error:
        return f"torch could not map symmetric memory: {error}"
    return None


def _agree(reason: str | None, group: ProcessGroup, device: torch.device) -> str | None:
    """Return this rank's reason, or a text that names another rank with a reason."""
    failed = async_collectives.all_reduce(torch.tensor(int(reason is not None), device=device), group, "max")
    return reason or ("another rank of the group cannot" if failed.item() else None)
