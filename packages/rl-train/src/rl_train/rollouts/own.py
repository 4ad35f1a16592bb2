"""Rollout engines of the user, which `--rollouts module:function` makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_train.options.functions import imported
from rl_train.options.options import TrainOptions
from rl_train.rollouts.interface import RolloutEngine

# (actor: `WholeBatches`, or a `RayModelGroup` with `--ray`; options of the run) -> its engine
MakeEngine = Callable[[Any, TrainOptions], RolloutEngine]


def engine_of(name: str) -> MakeEngine:
    """Import the function that makes an engine. Every rank calls it after the models are loaded; with Ray one process.

    Raises:
        ValueError: The name is not `module:function`, or the function cannot be used.
    """
    takes = "(actor, options) and returns a rl_train.rollouts.RolloutEngine"
    found: MakeEngine = imported("rollouts", name, ("native", "vllm"), takes)
    return found
