"""`rl-train train`: the training loop of actors and critics, from prompts in a file and a reward in Python."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
