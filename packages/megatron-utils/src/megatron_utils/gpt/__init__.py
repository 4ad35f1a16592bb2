"""Megatron-Core GPT models from Hugging Face configs, on packed batches."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
