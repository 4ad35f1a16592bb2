"""Triton kernels of the layers, as operators that torch.compile does not break on.

All modules import without Triton. Layers ask `parallel_layers.kernels.runtime` and use plain torch without Triton.
"""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
