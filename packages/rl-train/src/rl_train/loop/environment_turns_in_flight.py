"""`EnvironmentTurnsInFlight`: episodes that go on while the policy learns, and weights that change meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

from parallel_layers.module import hashed_seed
from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train.data.prompts import Prompt
from rl_train.engines.engine_on_ranks import BatchFuture, EngineOnRanks, request_of
from rl_train.engines.interface import Response
from rl_train.environments.worker import Turn
from rl_train.gateway.service import PoolFuture, PoolService
from rl_train.loop.environment_turns import EnvironmentAnswers, EnvironmentTurns, Episode
from rl_train.trajectories.recorder import Call
from rl_train.trajectories.samples import Sample, batch_of, part_of


@dataclass
class EnvironmentTurnsInFlight(EnvironmentTurns):
    """Draw responses of several turns by engines in flight, each conversation as fast as its environment answers.

    A thread of the rank with the environments gives each turn to a `PoolService` when the environment has answered,
    also while the policy learns. Each token has the version of the weights that drew it.
    """

    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "episodes"))

    @cached_property
    def service(self) -> PoolService:
        """Return the engines for all episodes, on the rank with the environments; the threads end with the run."""
        assert self.rewards is not None
        service = PoolService(cast(EngineOnRanks, self.engine).pool)
        self.rewards.at_end(service.close)
        self.rewards.at_end(partial(self._thread.shutdown, wait=False, cancel_futures=True))
        return service

    def draw(self, prompts: Sequence[Prompt], sampling: SamplingOptions) -> Future[Batch]:
        """See `EnvironmentTurns`; the episodes begin at once, and the future waits for their end."""
        episodes = self.begin(prompts, sampling)
        turns = None if self.rewards is None else TurnsInFlight(self, episodes, sampling)
        return BatchFuture(partial(self._end, episodes, turns), turns)

    def _end(self, episodes: list[Episode], turns: TurnsInFlight | None, future: BatchFuture) -> Batch:
        """Wait for the end of the episodes, and return their samples on all ranks."""
        while self.once(lambda: turns and self.service.wait(turns.ended)):
            cast(EngineOnRanks, self.engine).repeat_sync()
            if turns is not None:
                self.service.resume()
        # All ranks have the images.
        batch = self.once(lambda: turns and replace(batch_of(turns.samples()), visual=()))
        return replace(batch, visual=tuple(episode.sample.visual for episode in episodes))


class TurnsInFlight:
    """The episodes of one draw, on the rank with the environments; a `Pending`.

    The methods with an underscore run in the owner's thread.
    """

    def __init__(self, owner: EnvironmentTurnsInFlight, episodes: list[Episode], sampling: SamplingOptions) -> None:
        self._messages = list[str]()
        # A message goes to the terminal from the thread of the run alone.
        self._answers = EnvironmentAnswers(replace(owner, tell=self._messages.append), episodes)
        self._owner, self._service, self._sampling, self._episodes = owner, owner.service, sampling, episodes
        # All turns so far, and the episodes that have not ended.
        self._turns, self._open = list[PoolFuture](), set(range(len(episodes)))
        self._error: BaseException | None = None
        self._run(self._begin)

    def ended(self) -> bool:
        """Say whether all episodes have ended, or one has raised."""
        return self._error is not None or not self._open

    def done(self) -> bool:
        """See `Pending`."""
        return self.ended() or self._service.lost

    def version(self) -> int | None:
        """See `Pending`."""
        versions = (turn.drawing.version() for turn in list(self._turns) if turn.drawing is not None)
        return min((version for version in versions if version is not None), default=None)

    def samples(self) -> list[Sample]:
        """Return the samples of the episodes, or raise the error of one."""
        for message in self._messages:
            self._owner.tell(message)
        if self._error is not None:
            raise self._error
        return [episode.sample for episode in self._episodes]

    def _run(self, step: Callable[..., None], *arguments: Any) -> None:
        """Run a step in the owner's thread; its error ends the draw, and no later step runs."""

        def run() -> None:
            try:
                if self._error is None:
                    step(*arguments)
            except BaseException as error:
                self._error = error
                self._service.notify()

        with suppress(RuntimeError):  # the run has ended
            self._owner._thread.submit(run)

    def _begin(self) -> None:
        for number, episode in enumerate(self._episodes):
            asked = self._answers.ask(episode, "reset", dict(episode.prompt.row))
            asked.add_done_callback(partial(self._run, self._begun, number))

    def _begun(self, number: int, turn: Future[Turn]) -> None:
        episode = self._episodes[number]
        episode.call = Call(self._answers.begun(episode, turn.result()) or episode.prompt.tokens)
        self._draw(number)

    def _draw(self, number: int) -> None:
        """Have an engine draw the next turn of an episode."""
        episode, sample = self._episodes[number], self._episodes[number].sample
        seed = hashed_seed(self._sampling.seed, number, len(sample.parts), size=7, byteorder="big")
        request = request_of(episode.call.tokens, seed, sample.visual)
        turn = self._service.submit(request, replace(self._sampling, n=1, max_length=sample.limit))
        self._turns.append(turn)
        turn.add_done_callback(partial(self._run, self._drawn, number))

    def _drawn(self, number: int, turn: Future[Response]) -> None:
        """Take a turn that is drawn, and give it to the environment."""
        episode = self._episodes[number]
        episode.recorder.record(episode.call, part_of(turn.result()))
        self._answers.step(episode).add_done_callback(partial(self._run, self._answered, number))

    def _answered(self, number: int, turn: Future[Turn]) -> None:
        """Take an environment's answer: the next turn begins, or the episode ends."""
        episode = self._episodes[number]
        if episode.go_on(*self._answers.answer(episode, turn.result())):
            self._draw(number)
            return
        self._open.remove(number)
        self._service.notify()
