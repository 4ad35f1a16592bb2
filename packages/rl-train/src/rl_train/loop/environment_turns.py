"""`EnvironmentTurns`: episodes of several turns, which an engine and the environments take in turn.

An engine draws one response for every open episode. The environments answer, each in its process. A `Recorder` for
each episode appends the tokens of their messages, and the next call draws the next responses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from parallel_models import SamplingOptions
from parallel_models.generation import end_sessions
from rl_models import Batch
from rl_train.data.images import load_images
from rl_train.data.prompts import Prompt
from rl_train.engines.engine_on_ranks import BatchFuture
from rl_train.engines.interface import RolloutEngine
from rl_train.environments.worker import Turn
from rl_train.loop.checked_run import CheckedRun
from rl_train.rewards.function import Rewards
from rl_train.rewards.response import Response
from rl_train.trajectories.recorder import Call, Recorder
from rl_train.trajectories.samples import Sample, batch_of, next_call, parts_of, with_images

# The next call of the engine waits this number of seconds for steps; later ones join the call after it.
_PATIENCE_SECONDS = 2.0


@dataclass
class Episode:
    """One conversation of the policy with an environment.

    Attributes:
        prompt: The row.
        key: The number of the environment in `Environments`.
        recorder: The drawn turns.
        call: The next call of the engine.
        failed: Whether the environment failed; known on the rank that asks it.
    """

    prompt: Prompt
    key: int
    recorder: Recorder
    call: Call
    failed: bool = False

    @property
    def sample(self) -> Sample:
        """Return the one sample of the episode."""
        return self.recorder.samples[0]

    def go_on(self, numbers: Mapping[str, float], tail: Sequence[int] | None) -> bool:
        """Take the numbers of a turn and the tokens after it; say whether the episode goes on."""
        self.sample.count(**numbers)
        if tail is not None:
            self.call = Call([*self.sample.tokens, *tail], self.recorder.calls[-1])
        return tail is not None


@dataclass
class EnvironmentTurns:
    """Draw responses of several turns; all ranks of a run call `draw`, and wait for its futures in the same order.

    `rewards` has the environments; it is None on ranks where `once` (see `Recipe`) does not call its function. `tell`
    is called with a message about environments that failed.
    """

    checked_run: CheckedRun
    engine: RolloutEngine
    rewards: Rewards | None
    once: Callable[[Callable[[], Any]], Any]
    tell: Callable[[str], None]
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingOptions) -> list[Episode]:
        """Return new episodes, `sampling.n` about each prompt."""
        visual = load_images([prompt.chat for prompt in prompts]) or (None,) * len(prompts)
        episodes = []
        for prompt, images in zip(prompts, visual, strict=True):
            for key in itertools.islice(self._numbers, sampling.n):
                limit = len(prompt.tokens) + sampling.max_new_tokens
                recorder = Recorder(prompt, self.checked_run.codec, limit, images)
                episodes.append(Episode(prompt, key, recorder, Call(prompt.tokens)))
        return episodes

    def draw(self, prompts: Sequence[Prompt], sampling: SamplingOptions) -> Future[Batch]:
        """Return a future of the conversations, `sampling.n` for each prompt.

        The policy's own tokens are in the mask, and the engine's fields are theirs. Turns after the first are drawn
        when the future is waited for. `sampling.max_new_tokens` counts all tokens after the prompt.

        Raises:
            ValueError: An environment raised, took too long or broke the protocol, and `--rewards.errors` is stop; the
                error names the prompt's row.
        """
        end_sessions()  # what is cached depends on this draw alone, also in a run that is resumed
        episodes = self.begin(prompts, sampling)
        answers = EnvironmentAnswers(self, episodes)
        begins = self.once(answers.begin)
        for episode, tokens in zip(episodes, begins, strict=True):
            episode.call = Call(tokens or episode.prompt.tokens)
        if not any(begins):  # the episodes of a prompt share its computation
            rows, visual = (
                [prompt.tokens for prompt in prompts],
                tuple(x.sample.visual for x in episodes[:: sampling.n]),
            )
            drawing = self.engine.generate_async(with_images(rows, visual), sampling)
        else:
            drawing = self._generate(episodes, sampling, sampling.seed)
        return BatchFuture(partial(self._go_on, answers, sampling, drawing))

    def _generate(self, episodes: Sequence[Episode], sampling: SamplingOptions, seed: int) -> Future[Batch]:
        samples = [replace(episode.sample, tokens=episode.call.tokens) for episode in episodes]
        return self.engine.generate_async(*next_call(samples, sampling, seed))

    def _go_on(
        self, answers: EnvironmentAnswers, sampling: SamplingOptions, drawing: Future[Batch], future: BatchFuture
    ) -> Batch:
        drawn, pending = answers.episodes, True
        for call in itertools.count(1):
            if drawn:
                batch = drawing.result()
                if call == 1:  # the oldest weights that draw
                    future.drawn_anew = getattr(drawing, "drawn_anew", False)
                parts = parts_of(batch, [len(episode.call.tokens) for episode in drawn])
                for episode, part in zip(drawn, parts, strict=True):
                    episode.recorder.record(episode.call, part)
            elif not pending:
                break
            news, pending = self.once(partial(answers.wait, drawn))
            drawn = [answers.episodes[number] for number, *turn in news if answers.episodes[number].go_on(*turn)]
            if drawn:
                drawing = self._generate(drawn, sampling, sampling.seed + (call << 40))
        end_sessions()
        return batch_of([episode.sample for episode in answers.episodes])


@dataclass
class EnvironmentAnswers:
    """The answers of the environments to the episodes of one draw; used on one rank."""

    owner: EnvironmentTurns
    episodes: list[Episode]
    _steps: dict[Future[Turn], Episode] = field(default_factory=dict)

    def begin(self) -> list[list[int] | None]:
        """Make the environments; return the first tokens of each episode, or None to begin with its prompt."""
        asked = [self.ask(episode, "reset", dict(episode.prompt.row)) for episode in self.episodes]
        return [self.begun(episode, future.result()) for episode, future in zip(self.episodes, asked, strict=True)]

    def begun(self, episode: Episode, turn: Turn) -> list[int] | None:
        """Return the tokens with which an environment begins an episode; None: with its prompt."""
        prompt = episode.prompt
        episode.failed = self._fails(episode, turn.error)
        if episode.failed or not turn.messages:
            return None
        if prompt.chat is not None:
            raise ValueError(
                f"{episode.prompt.place}: the environment begins with messages, which would replace "
                "a prompt with images; return no messages from reset() there"
            )
        call = self._call(episode, turn.messages, episode.recorder.chat)
        if call is None:
            self.ask(episode, "close")  # its conversation has failed already
        if call is not None and len(call.tokens) >= episode.sample.limit:
            raise ValueError(
                f"{episode.prompt.place}: the environment begins with {len(call.tokens)} tokens, which leave no room "
                f"for a response: the prompt of the row has {len(prompt.tokens)} and --max-new-tokens is "
                f"{self.owner.checked_run.options.sampling.max_new_tokens}"
            )
        return None if call is None else call.tokens

    def wait(self, drawn: Sequence[Episode]) -> tuple[list[tuple[int, dict[str, float], list[int] | None]], bool]:
        """Have the environments answer the new turns of the episodes `drawn`, and return the answers that are there.

        Returns:
            For each answer the number of the episode and the result of `answer`; and whether other answers are pending.
        """
        self._steps |= {self.step(episode): episode for episode in drawn}
        done, _ = wait(self._steps, _PATIENCE_SECONDS)
        if not done:
            done, _ = wait(self._steps, return_when=FIRST_COMPLETED)
        turns = {self.episodes.index(self._steps.pop(future)): future.result() for future in done}
        answers = [(number, *self.answer(self.episodes[number], turns[number])) for number in sorted(turns)]
        return answers, bool(self._steps)

    def step(self, episode: Episode) -> Future[Turn]:
        """Ask the environment for its answer to the last turn of an episode."""
        if episode.failed:
            failed: Future[Turn] = Future()
            failed.set_result(Turn(error="failed in reset"))
            return failed
        sample, codec = episode.sample, self.owner.checked_run.codec
        begin, end, _ = sample.parts[-1]
        ids = sample.tokens[begin:end]
        reason = "length" if self._cut(sample) else "stop"
        response = Response(codec.decode(ids), codec.decode(ids, special=True), ids, reason)
        last = sample.room < 1 or len(sample.parts) >= self.owner.checked_run.options.data.max_turns
        return self.ask(episode, "step", response, last=last, thinking=codec.thinking(sample.tokens[:begin]))

    def answer(self, episode: Episode, turn: Turn) -> tuple[dict[str, float], list[int] | None]:
        """Return numbers of a turn (`COLUMNS`) by name, and the tokens that follow it; None at the end."""
        sample, failed, tokens = episode.sample, episode.failed or self._fails(episode, turn.error), None
        cut = turn.cut or self._cut(sample)
        if turn.messages and not failed:
            call = self._call(episode, turn.messages, partial(episode.recorder.reply, episode.recorder.calls[-1]))
            if call is not None and len(call.tokens) < sample.limit:
                tokens = call.tokens[len(sample.tokens) :]
            else:
                cut, failed = cut or call is not None, call is None
                failed = self._fails(episode, self.ask(episode, "close").result().error) or failed
        numbers = {"environment_reward": turn.reward, "tool_errors": turn.tool_errors}
        return {**numbers, "truncated": float(cut), "failed": float(failed)}, tokens

    def _cut(self, sample: Sample) -> bool:
        """Say whether the length limit ended the last turn."""
        return sample.room < 1 and sample.tokens[-1] not in self.owner.checked_run.stop_ids

    def ask(self, episode: Episode, asks: str, value: Any = None, **flags: bool) -> Future[Turn]:
        """Send a request to the environment; see `Environments.ask`."""
        rewards = self.owner.rewards
        assert rewards is not None
        assert rewards.environments is not None
        return rewards.environments.ask(episode.key, asks, value, **flags)

    def _fails(self, episode: Episode, error: str | None) -> bool:
        """Say whether an environment failed; ValueError for the first failure unless failures count as 0."""
        if error is None:
            return False
        text = f"{episode.prompt.place}: the environment {error}"
        if self.owner.checked_run.options.rewards.errors == "stop":
            raise ValueError(text)
        self.owner.tell(f"an environment failed, and its conversation counts as 0; {text}")
        return True

    def _call(self, episode: Episode, messages: Sequence[Any], make: Callable[[Sequence[Any]], Call]) -> Call | None:
        """Return a call with messages; None where the template refuses them and failures count as 0."""
        try:
            return make(messages)
        except ValueError as error:
            if self._fails(episode, f"said {list(messages)!r:.200}; {error}"):
                episode.failed = True
            return None
