"""Reinforcement learning of language models from prompts and a reward: loop, Ray groups, planner, command line."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_train.cluster.future import RankDied
    from rl_train.cluster.group import RayModelGroup
    from rl_train.cluster.placement import Placement
    from rl_train.cluster.resources import Resources

__all__ = ["Placement", "RankDied", "RayModelGroup", "Resources"]

# The module of each name, imported at the first use of the name: `rl-train --help` needs no torch.
_HOME = {
    "Placement": "rl_train.cluster.placement",
    "RankDied": "rl_train.cluster.future",
    "RayModelGroup": "rl_train.cluster.group",
    "Resources": "rl_train.cluster.resources",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rl_train' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
