"""`ModelConfig` describes a model; it is read from a Hugging Face config by the table of families."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
