"""Ranks on this machine (`launch`), and actors and critics on a Ray cluster (import those from `rl_train`).

Nothing is imported here: Ray imports `rl_train.cluster.host` on every rank before the rank may import torch.
"""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
