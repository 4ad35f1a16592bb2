"""Memory on every GPU of a group that the group's other GPUs write to, by their copy engines or from a kernel.

On torch's symmetric memory, of which only mapped buffers and barriers are taken: no multicast.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_TIMEOUT_MS = 600_000
"""How long a GPU waits at a barrier for the others before it fails: as long as NCCL does."""

_memories: WeakKeyDictionary[ProcessGroup, "PeerMemory"] = WeakKeyDictionary()


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
        # Not imported above: it starts the compiler's machinery, and few need it.
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.num_bytes = num_bytes
        self.in_graphs: list[PeerMemory] = []
        """This and what it took the place of, as far as captured CUDA graphs use them."""
        self._own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self._own, group)

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The beginning of a rank's buffer, as a tensor on this rank's device."""
        view: Tensor = self._handle.get_buffer(rank, shape, dtype)
        return view

    def barrier(self) -> None:
        """On the current stream: what follows runs when every rank's stream has come to its own call.

        What a rank's stream wrote before is then there. The ranks' barriers meet in the order of their calls.
        """
        self._handle.barrier(0, _TIMEOUT_MS)


def peer_memory(group: ProcessGroup, num_bytes: int, device: torch.device) -> PeerMemory:
    """The group's memory, of at least `num_bytes`; every rank asks for as many, in the same order.

    It grows with what is asked for. What captured CUDA graphs use is kept as long as the group.

    Raises:
        RuntimeError: A CUDA graph is being captured, and there is less; or torch cannot map the memory.
    """
    memory = _memories.get(group)
    capturing = torch.cuda.is_current_stream_capturing()
    if memory is None or memory.num_bytes < num_bytes:
        if capturing:
            raise RuntimeError(
                f"a CUDA graph cannot allocate the {num_bytes} bytes that the ranks map of each other; run what is "
                "to be captured once before"
            )
        torch.cuda.synchronize(device)  # what is given up may still be in use
        outgrown, memory = memory, PeerMemory(group, num_bytes, device)
        memory.in_graphs += outgrown.in_graphs if outgrown else []
        _memories[group] = memory
    if capturing and memory not in memory.in_graphs:
        memory.in_graphs.append(memory)
    return memory
