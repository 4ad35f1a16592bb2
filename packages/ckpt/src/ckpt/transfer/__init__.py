"""Tensors on their way: loaded, saved, resharded and streamed between ranks and files."""

from ckpt.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
