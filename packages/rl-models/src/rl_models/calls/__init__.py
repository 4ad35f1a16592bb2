"""One call of an actor or a critic: agree among ranks, divide the batch, run the engine, gather the results."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
