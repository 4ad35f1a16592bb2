"""Memory: recomputation with named random streams, and training state moved to the host and back."""

from parallel_layers.memory.offload import HostOffload

__all__ = ["HostOffload"]
