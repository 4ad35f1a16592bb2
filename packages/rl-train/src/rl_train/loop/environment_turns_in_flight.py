"""`EnvironmentTurnsInFlight`: episodes that go on while the policy learns, and weights that change meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any, cast

from parallel_layers.module import hashed_seed
from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train.data.prompts import Prompt
from rl_train.engines.engine_on_ranks import MOST_REPEATS, BatchFuture, EngineOnRanks, request_of
from rl_train.engines.in_flight import Drawing, InFlightPool
from rl_train.engines.interface import WeightsLostError
from rl_train.environments.worker import Turn
from rl_train.loop.environment_turns import EnvironmentAnswers, EnvironmentTurns, Episode
from rl_train.trajectories.recorder import Call
from rl_train.trajectories.samples import batch_of, from_json, part_of, to_json


@dataclass
class EnvironmentTurnsInFlight(EnvironmentTurns):
    """Draw responses of several turns by engines in flight, each conversation as fast as its environment answers.

    A thread of the rank with the environments gives each turn to an `InFlightPool` when the environment has answered,
    also while the policy learns. Each token has the version of the weights that drew it.
    """

    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "episodes"))

    def draw(self, prompts: list[Prompt], sampling: SamplingOptions) -> Future[Batch]:  # type: ignore[override]
        """See `EnvironmentTurns`; the episodes begin at once, and the future waits for their end."""
        episodes = self.begin(prompts, sampling)
        engine = cast(EngineOnRanks, self.engine)
        turns = None if self.rewards is None else TurnsInFlight(self, episodes, sampling, engine.pool)
        return BatchFuture(partial(self._end, episodes, turns, engine), turns)

    def _end(
        self, episodes: list[Episode], turns: TurnsInFlight | None, engine: EngineOnRanks, future: BatchFuture
    ) -> Batch:
        """Wait for the end of the episodes, and return their samples on all ranks."""

        def samples() -> list[Any] | None:
            assert turns is not None
            return turns.wait()

        for _ in range(1 + MOST_REPEATS):
            if (ended := self.once(samples)) is not None:
                break
            engine.repeat_sync()
        else:
            raise RuntimeError(f"the engines were lost {1 + MOST_REPEATS} times while they drew episodes")
        return batch_of([from_json(episode.sample, values) for episode, values in zip(episodes, ended, strict=True)])


class TurnsInFlight:
    """The episodes of one draw, on the rank with the environments; a `Pending`.

    All but `done`, `version` and `wait` runs in the owner's thread.
    """

    def __init__(
        self,
        owner: EnvironmentTurnsInFlight,
        episodes: list[Episode],
        sampling: SamplingOptions,
        pool: InFlightPool,
    ) -> None:
        self._messages = list[str]()
        # A message goes to the terminal from the thread of the run alone.
        self._answers = EnvironmentAnswers(replace(owner, tell=self._messages.append), episodes)
        self._owner, self._sampling, self._pool, self._episodes = owner, sampling, pool, episodes
        # The turns in flight by the number of the episode, and the first ones, which have the oldest version.
        self._turns, self._first = dict[int, Drawing](), list[Drawing]()
        # The episodes that have not ended, and those whose turn no engine draws.
        self._open, self._lost = set(range(len(episodes))), set[int]()
        self._error: BaseException | None = None
        self._event = Event()
        self._run(self._begin)

    def done(self) -> bool:
        """See `Pending`."""
        return self._event.is_set()

    def version(self) -> int | None:
        """See `Pending`."""
        versions = (drawing.version() for drawing in list(self._first))
        return min((version for version in versions if version is not None), default=None)

    def wait(self) -> list[Any] | None:
        """Return the samples as JSON values at the end of all episodes.

        None: the engines need weights, and then another `wait`.
        """
        self._run(self._go_on).result()
        self._event.wait()
        for message in self._messages:
            self._owner.tell(message)
        self._messages.clear()
        if self._error is not None:
            raise self._error
        return None if self._open else [to_json(episode.sample) for episode in self._episodes]

    def _run(self, step: Callable[..., None], *arguments: Any) -> Future[None]:
        """Run a step in the owner's thread; its error ends the draw."""

        def run() -> None:
            try:
                step(*arguments)
            except BaseException as error:
                self._error = self._error or error
                self._event.set()

        return self._owner._thread.submit(run)

    def _begin(self) -> None:
        for number, episode in enumerate(self._episodes):
            asked = self._answers.ask(episode, "reset", dict(episode.prompt.row))
            asked.add_done_callback(partial(self._run, self._begun, number))

    def _begun(self, number: int, turn: Future[Turn]) -> None:
        episode = self._episodes[number]
        episode.call = Call(self._answers.begun(episode, turn.result()) or episode.prompt.tokens)
        self._draw(number)

    def _draw(self, number: int) -> None:
        """Give the next turn of an episode to an engine."""
        episode, sample = self._episodes[number], self._episodes[number].sample
        seed = hashed_seed(self._sampling.seed, number, len(sample.parts), size=7, byteorder="big")
        request = request_of(episode.call.tokens, seed, sample.visual)
        sampling = replace(self._sampling, n=1, max_length=sample.limit)
        try:
            with self._pool.lock:
                self._turns[number] = self._pool.begin([request], sampling, lambda: self._run(self._drawn, number))
        except WeightsLostError:
            self._lose(number)
            return
        if not sample.parts:
            self._first.append(self._turns[number])

    def _lose(self, number: int) -> None:
        self._lost.add(number)
        self._event.set()

    def _go_on(self) -> None:
        """Draw the turns again that were lost; engines that have weights by now may draw some of them already."""
        if self._lost and self._error is None:
            self._event.clear()
        for number in list(self._lost):
            self._lost.remove(number)
            if number in self._turns:
                self._drawn(number)
            else:
                self._draw(number)

    def _drawn(self, number: int) -> None:
        """Take a turn that is drawn, and give it to the environment."""
        if self._error is not None or (drawing := self._turns.get(number)) is None or not drawing.done():
            return
        try:
            ((response,),) = drawing()
        except WeightsLostError:
            self._lose(number)
            return
        del self._turns[number]
        episode = self._episodes[number]
        episode.recorder.record(episode.call, part_of(response))
        self._answers.step(episode).add_done_callback(partial(self._run, self._answered, number))

    def _answered(self, number: int, turn: Future[Turn]) -> None:
        """Take an environment's answer: the next turn begins, or the episode ends."""
        episode = self._episodes[number]
        if episode.go_on(*self._answers.answer(episode, turn.result())):
            self._draw(number)
            return
        self._open.remove(number)
        if not self._open:
            self._event.set()
