"""Sharded actors and critics for reinforcement learning on language models, from a Hugging Face checkpoint and back."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
