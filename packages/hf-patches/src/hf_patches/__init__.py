"""Patches of Hugging Face models for RL: packed input, Ulysses sequence parallelism, fused log-probs and entropy."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
