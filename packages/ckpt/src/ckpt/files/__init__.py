"""Files: safetensors headers, dtypes, checksums, folders, and saves that appear whole or not at all."""

from ckpt.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
