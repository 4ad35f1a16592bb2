"""Actors and critics: what a user calls, the same on each backend."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
