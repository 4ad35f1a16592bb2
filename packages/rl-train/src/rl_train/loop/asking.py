"""`asking`: the function with which a run draws responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train.data.images import load_images
from rl_train.data.prompts import Prompt
from rl_train.engines.interface import RolloutEngine
from rl_train.loop.agent_episodes import AgentEpisodes
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.environment_turns import EnvironmentTurns
from rl_train.loop.environment_turns_in_flight import EnvironmentTurnsInFlight
from rl_train.rewards.function import Rewards
from rl_train.trajectories.samples import with_images

# (prompts, sampling) -> the responses, `sampling.n` to each prompt.
Ask = Callable[[Sequence[Prompt], SamplingOptions], Future[Batch]]


def asking(
    checked_run: CheckedRun,
    engine: RolloutEngine,
    rewards: Rewards | None,
    once: Callable[[Callable[[], Any]], Any],
    tell: Callable[[str], None],
) -> Ask:
    """Return the function with which a run draws responses.

    It is that of `AgentEpisodes` with agents, and of `EnvironmentTurns` with an environment of several turns.
    """
    if checked_run.options.runs_agents:
        return AgentEpisodes(checked_run, engine, rewards, once, tell).draw
    if checked_run.options.converses:
        kind = EnvironmentTurnsInFlight if checked_run.options.rollouts.in_flight else EnvironmentTurns
        return kind(checked_run, engine, rewards, once, tell).draw

    def ask(prompts: Sequence[Prompt], sampling: SamplingOptions) -> Future[Batch]:
        visual = load_images([prompt.chat for prompt in prompts])
        return engine.generate_async(with_images([prompt.tokens for prompt in prompts], visual), sampling)

    return ask
