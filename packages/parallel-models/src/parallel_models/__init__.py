"""Sharded language models from a Hugging Face checkpoint: they train and generate, without reinforcement learning."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
