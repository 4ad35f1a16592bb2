"""Optimizers of sharded parameters: AdamW and Muon, with fp32 master weights and moments of several formats."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
