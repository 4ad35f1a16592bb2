"""Tiny random models of every family, and reference numbers of unpatched transformers."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
