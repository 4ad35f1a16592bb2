"""RMSNorm, fused with the residual addition where a kernel allows it, and LayerNorm."""

from parallel_layers.norm.layer_norm import LayerNorm
from parallel_layers.norm.rms_norm import RMSNorm

__all__ = ["LayerNorm", "RMSNorm"]
