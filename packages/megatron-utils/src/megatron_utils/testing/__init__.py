"""`cpu_stand_in` runs Megatron-Core on a CPU, for tests and demonstrations; `tiny_config` describes small models."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
