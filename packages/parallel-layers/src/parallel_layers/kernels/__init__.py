"""Triton kernels of the layers, as operators that torch.compile does not break on.

All modules import without Triton. Layers ask `parallel_layers.kernels.runtime` and use plain torch without Triton.
"""
