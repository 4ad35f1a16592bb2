"""Memory on every GPU of a group that the group's other GPUs write to, by their copy engines or from a kernel.

This uses mapped buffers and barriers of torch's symmetric memory, and no multicast.
"""

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_TIMEOUT = timedelta(minutes=10)
"""A GPU's wait at a barrier for the others, where the group has no timeout: NCCL's default."""


class PeerMemory:
    """A buffer of the same size on every rank of a group, which all ranks map; every rank has to make it.

    Raises:
        RuntimeError: torch cannot map the memory.
    """

    def __init__(self, group: ProcessGroup, num_bytes: int, device: torch.device) -> None:
        # torch.distributed._symmetric_memory.empty may take memory from a pool of torch's; this never does.
        from torch._C._distributed_c10d import _SymmetricMemory

        self.num_bytes = num_bytes
        self._timeout_ms = _timeout(group, device) // timedelta(milliseconds=1)
        self._own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self._handle = _SymmetricMemory.rendezvous(self._own, group.group_name)

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> Tensor:
        """Return a rank's buffer from element `first` of `dtype` on, as a tensor on this rank's device."""
        view: Tensor = self._handle.get_buffer(rank, shape, dtype, first)
        return view

    def barrier(self) -> None:
        """Make the current stream wait until every rank's stream has come to its own barrier.

        All earlier writes of the ranks' streams are then there. The ranks' barriers meet in the order of their calls.
        When another rank does not come within the group's timeout, the kernel traps and the process loses its GPU.
        """
        self._handle.barrier(0, self._timeout_ms)


_memories: WeakKeyDictionary[ProcessGroup, dict[torch.device, PeerMemory]] = WeakKeyDictionary()
_in_graphs: WeakKeyDictionary[ProcessGroup, set[PeerMemory]] = WeakKeyDictionary()
"""Memory that captured CUDA graphs use, also after larger memory has taken its place."""


def peer_memory(group: ProcessGroup, num_bytes: int, device: torch.device) -> PeerMemory:
    """Return the group's memory of at least `num_bytes`; every rank asks for the same size, in the same order.

    The memory grows with the requests, and lives as long as the group. When it grows, the ranks exchange handles, and
    the host waits for the GPU.

    Raises:
        RuntimeError: A CUDA graph is being captured, and the memory is smaller. Or torch cannot map the memory; when
            one rank alone cannot (its GPU is full), the others wait for it until the store's timeout.
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
        torch.cuda.synchronize(device)  # the old memory may still be in use
        memory = None
        memories.pop(device, None)
        torch.cuda.empty_cache()  # torch's allocator keeps free memory, and this memory comes from elsewhere
        memory = memories[device] = PeerMemory(group, num_bytes, device)
    if capturing:
        _in_graphs.setdefault(group, set()).add(memory)
    return memory


def _timeout(group: ProcessGroup, device: torch.device) -> timedelta:
    options = getattr(group._get_backend(device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", _TIMEOUT)
    return timeout
