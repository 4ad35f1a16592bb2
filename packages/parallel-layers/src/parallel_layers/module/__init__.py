"""The base of every module of this package: shards of parameters, initial weights, seeds, views, and autocast."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
