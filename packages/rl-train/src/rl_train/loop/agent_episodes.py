"""`AgentEpisodes`: episodes of agents, programs that draw from the policy by the endpoint of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

from parallel_layers.module import hashed_seed
from parallel_models import SamplingOptions
from parallel_models.generation import end_sessions
from rl_models import Batch
from rl_train.agents.worker import Ended, Run
from rl_train.data.prompts import Prompt
from rl_train.engines.engine_on_ranks import BatchFuture, EngineOnRanks
from rl_train.engines.interface import RolloutEngine
from rl_train.engines.native import NativeEngine
from rl_train.gateway.rounds import RoundService
from rl_train.gateway.server import Gateway
from rl_train.gateway.service import PoolService
from rl_train.gateway.sessions import Limits, Session
from rl_train.loop.checked_run import CheckedRun
from rl_train.rewards.function import Rewards
from rl_train.trajectories.episodes import batch_of_episodes
from rl_train.trajectories.recorder import Recorder
from rl_train.trajectories.samples import Sample

# Tokens of a round of the policy itself, which keeps keys and values from one call to the next.
_ROUND_TOKENS = 64


@dataclass
class AgentEpisodes:
    """Run agents; all ranks of a run call `draw`, and wait for its futures in the same order.

    An engine in flight draws for the agents while the policy learns. Other engines draw in rounds, while a future is
    waited for.

    `rewards` has the processes of the agents; it is None on ranks where `once` (see `Recipe`) does not call its
    function. `tell` is called with a message about agents that failed.
    """

    checked_run: CheckedRun
    engine: RolloutEngine
    rewards: Rewards | None
    once: Callable[[Callable[[], Any]], Any]
    tell: Callable[[str], None]
    overridden: set[str] = field(default_factory=set)

    @property
    def in_flight(self) -> bool:
        """Say whether the engine draws while the policy learns."""
        return self.checked_run.options.rollouts.in_flight

    @cached_property
    def service(self) -> PoolService | RoundService:
        """Return the engine for many callers, on the rank with the agents."""
        if self.in_flight:
            return PoolService(cast(EngineOnRanks, self.engine).pool)
        return RoundService(_ROUND_TOKENS if isinstance(self.engine, NativeEngine) else None)

    @cached_property
    def gateway(self) -> Gateway:
        """Return the endpoint, on the rank with the agents; it ends with the processes of the agents."""
        assert self.rewards is not None
        context = self.checked_run.longest
        limit = float(self.checked_run.options.collective_timeout)
        gateway = Gateway(self.service, self.checked_run.codec, context=context, seconds=limit)
        gateway.start()
        self.rewards.at_end(self.service.close)
        self.rewards.at_end(gateway.close)
        return gateway

    def draw(self, prompts: Sequence[Prompt], sampling: SamplingOptions) -> Future[Batch]:
        """Return a future of the samples of episodes, `sampling.n` for each prompt.

        Raises:
            ValueError: An agent failed, and `--rewards.errors` is stop; the error names the prompt's row.
        """
        rows = [prompt for prompt in prompts for _ in range(sampling.n)]
        episodes = None if self.rewards is None else Episodes(self, rows, sampling)
        if episodes is not None and self.in_flight:
            episodes.begin()
        return BatchFuture(partial(self._end, episodes, sampling), episodes)

    def _end(self, episodes: Episodes | None, sampling: SamplingOptions, future: BatchFuture) -> Batch:
        """Draw until all episodes have ended, and return their samples on all ranks."""
        if self.in_flight:
            while self.once(lambda: episodes and self.service.wait(episodes.ended)):
                cast(EngineOnRanks, self.engine).repeat_sync()
                if isinstance(service := self.service if episodes else None, PoolService):
                    service.resume()
        else:
            self._draw_rounds(episodes, sampling)
        batch: Batch = self.once(lambda: episodes and batch_of_episodes(episodes.samples()))
        return batch

    def _draw_rounds(self, episodes: Episodes | None, sampling: SamplingOptions) -> None:
        """Begin the episodes, and draw for them until they have ended."""
        end_sessions()  # what is cached depends on this draw alone
        if episodes is not None:
            episodes.begin()
        number, stop_ids = 0, tuple(sampling.stop_ids)
        while (asked := self.once(lambda: episodes and self.service.wait(episodes.ended))) is not None:
            prompts, most = asked
            number += 1
            seed = hashed_seed(sampling.seed, number, size=7)
            options = replace(sampling, n=1, max_new_tokens=most, max_length=self.checked_run.longest, seed=seed)
            batch = self.engine.generate(prompts, options)
            if episodes is not None:
                cast(RoundService, self.service).give(batch, stop_ids)
        end_sessions()


class Episodes:
    """The episodes of one draw, on the rank with the agents; a `Pending`."""

    def __init__(self, owner: AgentEpisodes, rows: Sequence[Prompt], sampling: SamplingOptions) -> None:
        self._owner, self._rows = owner, rows
        self._version: int | None = None
        self._ends = list[Future[Ended]]()
        options, run = owner.checked_run.options.agents, owner.checked_run
        self._sessions = [
            Session(
                Recorder(row, run.codec, run.longest),
                replace(sampling, n=1),
                hashed_seed(sampling.seed, number, size=7),
                Limits(options.max_calls, options.max_tokens or None),
            )
            for number, row in enumerate(rows)
        ]

    def begin(self) -> None:
        """Run the agents, as many at a time as the options say."""
        assert self._owner.rewards is not None
        agents, self._gateway = self._owner.rewards.agents, self._owner.gateway
        assert agents is not None
        for session, row in zip(self._sessions, self._rows, strict=True):
            end = agents.run(partial(self._run, session, row))
            end.add_done_callback(partial(self._ended, session))
            self._ends.append(end)

    def _run(self, session: Session, row: Prompt) -> Run:
        """Open the session of an episode, whose time begins now."""
        owner = self._owner
        assert owner.rewards is not None
        assert owner.rewards.agents is not None
        if self._version is None:
            self._version = owner.engine.version
        self._gateway.add(session)
        return owner.rewards.agents.run_of(self._gateway.base_url(session), session.key, dict(row.row))

    def _ended(self, session: Session, _: Future[Ended]) -> None:
        self._gateway.end(session)
        self._owner.service.notify()

    def ended(self) -> bool:
        """Say whether all episodes have ended, and their records with them."""
        return all(session.ended for session in self._sessions)

    def done(self) -> bool:
        """See `Pending`."""
        return self.ended() or (isinstance(service := self._owner.service, PoolService) and service.lost)

    def version(self) -> int | None:
        """See `Pending`: the version when the first episode began."""
        return self._version

    def samples(self) -> list[list[Sample]]:
        """Return the samples of each episode, with their rewards."""
        for session, end, row in zip(self._sessions, self._ends, self._rows, strict=True):
            reward, error = end.result()
            if session.failed:
                error = f"got an error of the endpoint: {session.failed}"
            reward = session.reward if reward is None else reward
            if error is None and reward is None and self._owner.checked_run.options.reward == "environment":
                error = "returned no reward and reported none; return a number, or give --reward a scorer"
            failed = self._fails(row, error)
            last = session.recorder.samples[-1]
            last.count(environment_reward=reward or 0.0, failed=failed, truncated=bool(session.limited))
            if names := session.overridden.keys() - self._owner.overridden:
                self._owner.overridden |= names
                self._owner.tell(
                    f"agents ask for other {', '.join(sorted(names))} than the run, which draws all tokens"
                )
        return [session.recorder.samples for session in self._sessions]

    def _fails(self, row: Prompt, error: str | None) -> bool:
        """Say whether an agent failed; ValueError for the first failure unless failures count as 0."""
        if error is None:
            return False
        text = f"{row.place}: the agent {error}"
        if self._owner.checked_run.options.rewards.errors == "stop":
            raise ValueError(text)
        self._owner.tell(f"an agent failed, and its episode counts as 0; {text}")
        return True
