"""Plan the memory of a run before it starts, and check its model and folders."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
