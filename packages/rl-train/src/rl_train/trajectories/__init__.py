"""Episodes as token ids: a recorder of their calls, and the samples that a policy learns from."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
