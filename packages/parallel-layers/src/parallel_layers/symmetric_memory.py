"""Matrix products that overlap with their gather or scatter, over memory that the ranks' GPUs map of each other.

torch's operators cut the product by rank: while one part is multiplied, the next is copied from (or to) its rank by the
GPU's copy engines. They need peer access between all GPUs of the group (NVLink), and no multicast: of torch's kernels
only those are taken that copy from one GPU to one. Where a GPU reports multicast but its driver or container refuses
it, torch cannot map the memory either, unless the environment says TORCH_SYMM_MEM_DISABLE_MULTICAST=1.

Shape suffixes: T tokens, I input features, O output features, of which this rank has `T/n`, `I/n` or `O/n`.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import comm


def gather_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """`all_gather(x) W^T + b` and `all_gather(x)`.

    x `[T/n, ..., I]`, weight `[O/n, I]`, bias `[O/n]` -> `[T, ..., O/n]` and `[T, ..., I]`.
    """
    # Without the gathered x among its results, torch would take a multicast kernel for few tokens.
    gathered, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
        x.contiguous(), [weight.t()], 0, group.group_name, return_A=True
    )
    return y if bias is None else y.add_(bias), gathered


def matmul_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
    """`reduce_scatter(x W^T) + b`: x `[T, ..., I/n]`, weight `[O, I/n]`, bias `[O]` -> `[T/n, ..., O]`.

    The ranks' parts are rounded to x's dtype, then summed in fp32 and rounded once.

    Raises:
        ValueError: n does not divide T.
    """
    comm.check_divisible(x, 0, group)
    y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), weight.t(), "sum", 0, group.group_name)
    return y if bias is None else y.add_(bias)


def why_not_symmetric_memory(group: ProcessGroup | None, device: torch.device) -> str | None:
    """Why the ranks of `group` cannot use these products on `device`, in words; None when they can.

    Every rank has to ask, and every rank gets a reason or none does. Communication, on CUDA: an all-gather and two
    all-reduces of a few bytes, and the exchange of a handle of a buffer.
    """
    if group is None or not comm.is_sharded(group):
        return "one rank has nothing to send"
    if device.type != "cuda":
        return f"it needs CUDA devices, not {device.type}"
    return _why_not_linked(group, device, torch.cuda.current_device() if device.index is None else device.index)


def _why_not_linked(group: ProcessGroup, device: torch.device, own: int) -> str | None:
    """Why not, where this rank's GPU is number `own`; the messages are tensors on `device`."""
    ids = [_gpu_id(i) for i in range(torch.cuda.device_count())]
    gathered = comm.all_gather(torch.tensor(list(ids[own]), dtype=torch.uint8, device=device)[None], group)
    peers = [bytes(row) for row in gathered.tolist()]
    reason = _agree(why_not_peers(own, ids, peers, torch.cuda.can_device_access_peer), group, device)
    return reason or _agree(_why_not_mapped(group, device), group, device)


def why_not_peers(
    own: int, visible: Sequence[bytes], peers: Sequence[bytes], can_access: Callable[[int, int], bool]
) -> str | None:
    """Why GPU `own` cannot reach all of `peers`, in words; None when it can.

    Args:
        own: This process's GPU, as an index of `visible`.
        visible: Ids of the GPUs that this process sees.
        peers: Each rank's GPU's id.
        can_access: Whether one GPU (first index) can map another's memory (second).
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
    """The same in every process that sees the GPU, and of a fixed length."""
    return sha256(str(torch.cuda.get_device_properties(index).uuid).encode()).digest()


def _why_not_mapped(group: ProcessGroup, device: torch.device) -> str | None:
    try:
        # Also defines the operators. Not imported above: it starts the compiler's machinery, and few need it.
        from torch.distributed import _symmetric_memory as symmetric_memory

        buffer = symmetric_memory.empty(1024, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(buffer, group)
    except (ImportError, RuntimeError) as error:
        return f"torch could not map symmetric memory: {error}"
    missing = [name for name in ("all_gather_matmul", "matmul_reduce_scatter") if not _has_operator(f"fused_{name}")]
    return f"this torch has no torch.ops.symm_mem.fused_{missing[0]}" if missing else None


def _has_operator(name: str) -> bool:
    return hasattr(torch.ops.symm_mem, name)


def _agree(reason: str | None, group: ProcessGroup, device: torch.device) -> str | None:
    """Every rank's own reason, or another's."""
    failed = comm.all_reduce(torch.tensor(int(reason is not None), device=device), group, "max")
    return reason or ("another rank of the group cannot" if failed.item() else None)
