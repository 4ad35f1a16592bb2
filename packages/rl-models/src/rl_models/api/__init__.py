"""Actors and critics: one interface for users, on every backend."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
