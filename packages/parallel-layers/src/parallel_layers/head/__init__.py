"""Head and losses over a sharded vocabulary, without materialised logits."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
