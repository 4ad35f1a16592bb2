"""Tensor-, sequence- and context-parallel transformer layers and collectives for PyTorch, on torch alone."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
