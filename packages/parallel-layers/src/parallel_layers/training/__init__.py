"""Training beside the layers: sums and norms of gradients, the learning rate, and training state for checkpoints."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
