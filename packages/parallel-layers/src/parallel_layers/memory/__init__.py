"""Memory: recomputation with named random streams, and training state moved to the host and back."""

from parallel_layers.memory.offload import HostOffload
from parallel_layers.memory.streamed import StreamedTensors

__all__ = ["HostOffload", "StreamedTensors"]
