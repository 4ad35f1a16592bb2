"""Weight sync: send the weights of an actor, in buckets, to engines in other processes."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
