"""RMSNorm, fused with the residual addition where a kernel allows it."""

from parallel_layers.norm.rms_norm import RMSNorm

__all__ = ["RMSNorm"]
