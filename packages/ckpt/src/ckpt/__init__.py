"""Hugging Face safetensors to and from any tensor-, pipeline- and expert-parallel grid: streaming, exact, verified."""

from ckpt.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
