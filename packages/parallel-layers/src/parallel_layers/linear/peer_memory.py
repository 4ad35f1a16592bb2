"""Memory on every GPU of a group that the group's other GPUs write to, by their copy engines or from a kernel.

On torch's symmetric memory, of which only mapped buffers and barriers are taken: no multicast.
"""

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_TIMEOUT = timedelta(minutes=10)
"""How long a GPU waits at a barrier for the others, where the group does not say: NCCL's default."""


class PeerMemory:
    """A buffer of the same size on every rank of a group, each mapped by all; every rank has to make it.

    Args:
        group: Ranks whose GPUs have peer access to each other.
        num_bytes: Of a buffer.
        device: This rank's GPU.

    Communication: exchanges handles, once.

    Raises:
        RuntimeError: torch cannot map the memory.
    """

    def __init__(self, group: ProcessGroup, num_bytes: int, device: torch.device) -> None:
        # What torch.distributed._symmetric_memory calls, whose own `empty` may take memory from a pool of torch's.
        from torch._C._distributed_c10d import _SymmetricMemory

        self.num_bytes = num_bytes
        self._timeout_ms = _timeout(group, device) // timedelta(milliseconds=1)
        self._own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self._handle = _SymmetricMemory.rendezvous(self._own, group.group_name)

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> Tensor:
        """A rank's buffer from element `first` of `dtype` on, as a tensor on this rank's device."""
        view: Tensor = self._handle.get_buffer(rank, shape, dtype, first)
        return view

    def barrier(self) -> None:
        """On the current stream: what follows runs when every rank's stream has come to its own call.

        What a rank's stream wrote before is then there. The ranks' barriers meet in the order of their calls. When
        another rank does not come within the group's timeout, the kernel traps and the process can use its GPU no more.
        """
        self._handle.barrier(0, self._timeout_ms)


_memories: WeakKeyDictionary[ProcessGroup, dict[torch.device, PeerMemory]] = WeakKeyDictionary()
_in_graphs: WeakKeyDictionary[ProcessGroup, set[PeerMemory]] = WeakKeyDictionary()
"""What captured CUDA graphs use, also when larger memory has taken its place."""


def peer_memory(group: ProcessGroup, num_bytes: int, device: torch.device) -> PeerMemory:
    """The group's memory, of at least `num_bytes`; every rank asks for as many, in the same order.

    It grows with what is asked for, and lives as long as the group.

    Communication: that of `PeerMemory`, when it grows; the host then waits for the GPU.

    Raises:
        RuntimeError: A CUDA graph is being captured, and there is less. Or torch cannot map the memory: if on one rank
            alone, whose GPU is full, then the others wait for it until the store's timeout.
    """
    memories = _memories.setdefault(group, {})
    memory = memories.get(device)
    capturing = torch.cuda.is_current_stream_capturing()
    if memory is None or memory.num_bytes < num_bytes:
        if capturing:
            raise RuntimeError(
                f"a CUDA graph cannot allocate the {num_bytes} bytes that the ranks map of each other; run what is "
                "to be captured once before"
            )
        torch.cuda.synchronize(device)  # what is given up may still be in use
        memory = None
        memories.pop(device, None)
        torch.cuda.empty_cache()  # this memory is not of torch's allocator, which keeps what is free
        memory = memories[device] = PeerMemory(group, num_bytes, device)
    if capturing:
        _in_graphs.setdefault(group, set()).add(memory)
    return memory


def _timeout(group: ProcessGroup, device: torch.device) -> timedelta:
    options = getattr(group._get_backend(device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", _TIMEOUT)
    return timeout
