"""GEMMs that overlap with their gather or scatter, over memory that the ranks' GPUs map of each other.

A gather copies this rank's tokens to the others' memory by the GPU's copy engines, while the GEMM of this rank's own
tokens runs; the other ranks' tokens are multiplied as they arrive. A scatter multiplies the other ranks' tokens first,
sends each rank its products during the next GEMM, and sums the parts that it received. GEMMs run on two streams, so
that one fills the SMs that the last wave of the other leaves idle.

The GPUs of the group need peer access to each other (NVLink), and no multicast. Where a GPU reports multicast but its
driver or container refuses it, torch maps the memory only with TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in the environment.

Each call begins with a barrier, and a rank writes to the others' memory only after it: every GPU has then come to this
call, and has read what the last call brought. So the calls of a group belong on one stream, in the same order on every
rank. The memory holds an activation of all tokens; for a gather and a scatter at once, two.

Shape suffixes: T tokens, I input features, O output features, of which this rank has `T/tp`, `I/tp` or `O/tp`.
"""

import functools
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.kernels.sum import sum_parts
from parallel_layers.linear.peer_memory import PeerMemory, peer_memory
from parallel_layers.linear.products import multiply_into

Used = TypeVar("Used")


def gather_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, *, keep: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `all_gather(x) W^T + b` and `all_gather(x)`, which is good until the group's next call.

    Without `keep` this rank's tokens are missing among those gathered.

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


def matmul_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
    """Return `reduce_scatter(x W^T) + b`: x `[T, ..., I/tp]`, weight `[O, I/tp]`, bias `[O]` -> `[T/tp, ..., O]`.

    The ranks' parts are rounded to x's dtype, then summed in fp32 and rounded once. The first rank's part has the bias.
    """
    async_collectives.check_divisible(x, 0, group)
    parts = x.reshape(group.size(), -1, x.shape[-1])
    memory = peer_memory(group, parts[..., 0].numel() * len(weight) * x.element_size(), x.device)
    main, side, copies = _streams(x.device)

    copies.wait_stream(main)
    with copies:
        memory.barrier()
    side.wait_stream(main)
    bias = bias if group.rank() == 0 else None
    received, _sent = _send_products(parts, weight, bias, group, memory)
    with copies:
        memory.barrier()
    main.wait_stream(copies)
    return sum_parts(received).view(len(x) // group.size(), *x.shape[1:-1], -1)


def matmul_reduce_scatter_beside_gather(
    dy: Tensor, weight: Tensor, x: Tensor, group: ProcessGroup, use: Callable[[Tensor], Used]
) -> tuple[Tensor, Used]:
    """Return `matmul_reduce_scatter` of dy, and what `use` makes of `all_gather(x)`.

    dy `[T, ..., O/tp]`, weight `[I, O/tp]`, x `[T/tp, ..., I]` -> `[T/tp, ..., I]`. The gathered tokens `[T, ..., I]`,
    which are good until `use` returns, arrive under the GEMM of dx; the ranks send each other dx under `use`.
    """
    size, rank = group.size(), group.rank()
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    parts = dy.reshape(size, -1, dy.shape[-1])
    shape = (size, *rows.shape)
    memory = peer_memory(group, 2 * size * rows.nbytes, x.device)
    gathered = memory.of(rank, shape, x.dtype)
    main, side, copies = _streams(x.device)

    copies.wait_stream(main)
    with copies:
        memory.barrier()
        for step in range(1, size):
            memory.of((rank + step) % size, shape, x.dtype)[rank].copy_(rows)
        memory.barrier()
        arrived = copies.record_event()
    side.wait_stream(main)
    gathered[rank].copy_(rows)
    received, _sent = _send_products(parts, weight, None, group, memory, size * rows.numel())
    with copies:
        memory.barrier()
    main.wait_event(arrived)
    used = use(gathered.view(size * len(x), *x.shape[1:]))
    main.wait_stream(copies)
    return sum_parts(received).view(x.shape), used


def _send_products(
    parts: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    memory: PeerMemory,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Multiply each rank's part and send the product to that rank, into its memory from element `first` on.

    Return the products that this rank receives, `[tp, T/tp, O]`, and those that it sends, `[tp - 1, T/tp, O]`. This
    rank's own part is multiplied last, while the others are on their way. All have arrived after a barrier on the
    copies' stream; keep the sent products until the current stream has waited for that barrier. The side stream must
    have waited for the current one.
    """
    size, rank = group.size(), group.rank()
    shape = (size, parts.shape[1], weight.shape[0])
    received = memory.of(rank, shape, parts.dtype, first)
    sent = parts.new_empty(size - 1, *shape[1:])
    others = [(rank + step) % size for step in range(1, size)]
    _, side, copies = _streams(parts.device)
    done = []
    with side:
        for other, sending in zip(others, sent, strict=True):
            multiply_into(sending, parts[other], weight, bias)
            done.append(side.record_event())
    with copies:
        for other, sending, ready in zip(others, sent, done, strict=True):
            copies.wait_event(ready)
            memory.of(other, shape, parts.dtype, first)[rank].copy_(sending)
    async_collectives.head_start(parts)  # to the products that others wait for
    multiply_into(received[rank], parts[rank], weight, bias)
    return received, sent


def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream, torch.Stream]:
    """Return the current stream, a side stream for GEMMs, and a stream for copies and the barriers around them.

    The last two take precedence, because other ranks wait for them.
    """
    return torch.accelerator.current_stream(device), *_streams_of(device)


@functools.cache
def _streams_of(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    return torch.Stream(device, priority=-1), torch.Stream(device, priority=-1)


_reasons: WeakKeyDictionary[ProcessGroup, dict[torch.device, str | None]] = WeakKeyDictionary()


def why_not_symmetric_memory(group: ProcessGroup | None, device: torch.device) -> str | None:
    """Return why the ranks of `group` cannot use these products on `device`, in words; None when they can.

    Every rank has to ask, and every rank gets a reason or none does. Communication, on CUDA, once for each group and
    device: an all-gather and two all-reduces of a few bytes, and the exchange of a handle of a buffer.
    """
    if group is None or not async_collectives.is_sharded(group):
        return "one rank has nothing to send"
    if device.type != "cuda":
        return f"it needs CUDA devices, not {device.type}"
    reasons = _reasons.setdefault(group, {})
    if device not in reasons:
        own = torch.cuda.current_device() if device.index is None else device.index
        reasons[device] = _why_not_linked(group, device, own)
    return reasons[device]


def _why_not_linked(group: ProcessGroup, device: torch.device, own: int) -> str | None:
    """Return why not, where this rank's GPU is number `own`; the messages are tensors on `device`."""
    ids = [_gpu_id(i) for i in range(torch.cuda.device_count())]
    gathered = async_collectives.all_gather(torch.tensor(list(ids[own]), dtype=torch.uint8, device=device)[None], group)
    peers = [bytes(row) for row in gathered.tolist()]
    reason = _agree(why_not_peers(own, ids, peers, torch.cuda.can_device_access_peer), group, device)
    return reason or _agree(_why_not_mapped(group, device), group, device)


def why_not_peers(
    own: int, visible: Sequence[bytes], peers: Sequence[bytes], can_access: Callable[[int, int], bool]
) -> str | None:
    """Return why this process's GPU `own` cannot reach all of `peers`, the ids of the ranks' GPUs; None when it can.

    `visible` are the ids of the GPUs that this process sees; `can_access` says whether a GPU can map another's memory.
    """
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
    return sha256(str(torch.cuda.get_device_properties(index).uuid).encode()).digest()


def _why_not_mapped(group: ProcessGroup, device: torch.device) -> str | None:
    try:
        PeerMemory(group, 1024, device)
    except (ImportError, RuntimeError) as error:
        return f"torch could not map symmetric memory: {error}"
    return None


def _agree(reason: str | None, group: ProcessGroup, device: torch.device) -> str | None:
    """Return this rank's reason, or that another rank has one."""
    failed = async_collectives.all_reduce(torch.tensor(int(reason is not None), device=device), group, "max")
    return reason or ("another rank of the group cannot" if failed.item() else None)
