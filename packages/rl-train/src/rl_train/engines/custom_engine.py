"""Rollout engines of the user, which `--rollouts module:function` makes."""

from __future__ import annotations

from collections.abc import Callable

from rl_models import Policy
from rl_train.engines.interface import RolloutEngine
from rl_train.options.functions import imported
from rl_train.options.options import TrainOptions

# (actor: `WholeBatches`, or a `RayModelGroup` with `--ray`; options of the run) -> its engine
MakeEngine = Callable[[Policy, TrainOptions], RolloutEngine]


def engine_of(name: str) -> MakeEngine:
    """Import the function that makes an engine. Every rank calls it with loaded models; with Ray one process.

    Raises:
        ValueError: The name is not `module:function`, or the function cannot be used.
    """
    takes = "(actor, options) and returns a rl_train.engines.RolloutEngine"
    make: MakeEngine = imported("rollouts", name, ("native", "vllm", "http://HOST:PORT"), takes)
    return make


def make_engine(name: str, actor: Policy, options: TrainOptions) -> RolloutEngine:
    """Return the engine that the function of this name makes.

    Raises:
        ValueError: The returned object lacks a method or an attribute of `RolloutEngine`.
    """
    engine = engine_of(name)(actor, options)
    members = {*vars(RolloutEngine), *RolloutEngine.__annotations__}
    if missing := sorted(member for member in members if not member.startswith("_") and not hasattr(engine, member)):
        raise ValueError(
            f"rollouts={name} returned {type(engine).__name__}, which lacks {', '.join(missing)}; see "
            "rl_train.engines.RolloutEngine"
        )
    return engine
