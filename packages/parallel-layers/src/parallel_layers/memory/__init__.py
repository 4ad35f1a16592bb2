"""Memory: contiguous buffers carved into named tensors, and training state moved to the host and back."""

from parallel_layers.memory.buffers import (
    ALIGNMENT,
    ContiguousBuffer,
    NamedBuffers,
    Slot,
    alignment_of,
    map_parameters,
    plan_slots,
)
from parallel_layers.memory.offload import HostOffload

__all__ = [
    "ALIGNMENT",
    "ContiguousBuffer",
    "HostOffload",
    "NamedBuffers",
    "Slot",
    "alignment_of",
    "map_parameters",
    "plan_slots",
]
