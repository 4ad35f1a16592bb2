"""`rl-train quickstart`: a small model learns a small task, end to end on real files."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
