"""Training checkpoints on Megatron-Core's distributed format, across any change of grid."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
