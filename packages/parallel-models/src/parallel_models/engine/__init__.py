"""The interface of an engine, its grid and options, and the facts of a checkpoint that are read before loading."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
