"""Rollout engines of the user, which `--rollouts module:function` makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_train.engines.interface import RolloutEngine
from rl_train.options.functions import imported
from rl_train.options.options import TrainOptions

# (actor: `WholeBatches`, or a `RayModelGroup` with `--ray`; options of the run) -> its engine
MakeEngine = Callable[[Any, TrainOptions], RolloutEngine]


def engine_of(name: str) -> MakeEngine:
    """Import the function that makes an engine. Every rank calls it after the models are loaded; with Ray one process.

    Raises:
        ValueError: The name is not `module:function`, or the function cannot be used.
    """
    takes = "(actor, options) and returns a rl_train.engines.RolloutEngine"
    found: MakeEngine = imported("rollouts", name, ("native", "vllm"), takes)
    return found


def make_engine(name: str, actor: Any, options: TrainOptions) -> RolloutEngine:
    """Return the engine that the function of this name makes.

    Raises:
        ValueError: What it returned lacks a method or an attribute of `RolloutEngine`.
    """
    made = engine_of(name)(actor, options)
    members = {*vars(RolloutEngine), *RolloutEngine.__annotations__}
    if missing := sorted(member for member in members if not member.startswith("_") and not hasattr(made, member)):
        raise ValueError(
            f"rollouts={name} returned {type(made).__name__}, which lacks {', '.join(missing)}; see "
            "rl_train.engines.RolloutEngine"
        )
    return made
