"""RMSNorm, fused with the residual addition where a kernel allows it, and LayerNorm."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
