"""Mixture of experts: router, grouped experts over an expert-parallel group, auxiliary losses, router replay."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
