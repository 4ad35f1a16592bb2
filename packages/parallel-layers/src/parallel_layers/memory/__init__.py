"""Memory: recomputation with named random streams, and training state moved to the host and back."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
