"""Process groups: the mesh, collectives with and without autograd, and the gradient norm over ranks."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
