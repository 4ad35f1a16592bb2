"""GPUs as torch names them: the only place, beside kernels, that says which kind they are."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
