"""Layouts: the rectangles of Hugging Face tensors that every rank of a grid holds."""

from ckpt.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
