"""The engine on parallel-layers: FSDP2, tensor, context, expert and pipeline parallelism."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
