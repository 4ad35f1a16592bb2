"""Megatron-Core hybrid models on packed batches: layers of Mamba-2 and gated delta networks beside attention."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
