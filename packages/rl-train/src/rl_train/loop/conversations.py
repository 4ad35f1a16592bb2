"""`Conversations`: responses of several turns; an engine and the environments of the samples take turns.

An engine draws one response for every open conversation. The environments answer, each in its process. The tokens of
their messages are appended, and the next call draws the next responses. Drawn tokens are never tokenised again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_models import SamplingOptions
from parallel_models.generation import end_sessions
from rl_models import Batch
from rl_models.calls import DECODING_STEPS, PROMPT_TOKENS_COMPUTED
from rl_train.data.images import load_images
from rl_train.data.prompts import Prompt
from rl_train.data.sources import place
from rl_train.engines.engine_on_ranks import BatchFuture
from rl_train.engines.interface import RolloutEngine
from rl_train.environments.worker import Turn
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.samples import Sample, batch_of, next_call, take_parts, with_images
from rl_train.rewards.function import Rewards
from rl_train.rewards.response import Response

# A field of the batch, `[T, 5]`: these numbers of each turn at the last token that the policy drew in it, 0 elsewhere.
TURNS = "turns"
COLUMNS = ("turns", "environment_reward", "tool_errors", "truncated", "failed")

# The next call of the engine waits this number of seconds for steps; later ones join the call after it.
_PATIENCE_SECONDS = 2.0
# The number of tokens before an answer in which a tag may begin a thought.
_TAIL = 16


def totals(batch: Batch) -> dict[str, Tensor]:
    """Return the sums of `COLUMNS` over each conversation, `[N]` each; empty for responses of one turn.

    A conversation whose environment failed has a reward of 0.
    """
    if TURNS not in batch.fields:
        return {}
    sums = {name: batch.sum_by_sequence(batch[TURNS][:, column]) for column, name in enumerate(COLUMNS)}
    return sums | {"environment_reward": sums["environment_reward"].where(sums["failed"] == 0, 0.0)}


def describe(batch: Batch) -> dict[str, float]:
    """Return the metrics of conversations, and of tokens computed to draw and drawn in a step of the model."""
    sums = totals(batch)
    metrics = {"turns": float(sums["turns"].mean()), "tool_errors": float(sums["tool_errors"].sum())} if sums else {}
    if PROMPT_TOKENS_COMPUTED in batch.fields:
        metrics["prompt_tokens_computed"] = float(batch[PROMPT_TOKENS_COMPUTED].sum())
    if DECODING_STEPS in batch.fields:
        metrics["tokens_per_decoding_step"] = float(batch.mask.sum() / batch[DECODING_STEPS].sum())
    return metrics


@dataclass
class Conversation(Sample):
    """A conversation: its number in `Environments`, and for each turn the numbers of `COLUMNS`.

    `failed`, whether its environment failed, is known on the rank that asks it.
    """

    key: int = 0
    numbers: list[list[float]] = field(default_factory=list)
    failed: bool = False


@dataclass
class Conversations:
    """Draw responses of several turns; all ranks of a run call `draw`, and wait for its futures in the same order.

    Attributes:
        checked_run: The run.
        engine: Draws the turns.
        rewards: Has the environments; None on ranks where `once` does not call its function.
        once: Calls a function on one rank and returns its JSON value on all.
        tell: Called with a message about environments that failed.
    """

    checked_run: CheckedRun
    engine: RolloutEngine
    rewards: Rewards | None
    once: Callable[[Callable[[], Any]], Any]
    tell: Callable[[str], None]
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingOptions) -> list[Conversation]:
        """Return new conversations, `sampling.n` about each prompt."""
        visual = load_images([prompt.chat for prompt in prompts]) or (None,) * len(prompts)
        return [
            Conversation(prompt, images, len(prompt.tokens) + sampling.max_new_tokens, prompt.tokens, key=key)
            for prompt, images in zip(prompts, visual, strict=True)
            for key in itertools.islice(self._numbers, sampling.n)
        ]

    def draw(self, file: Path, prompts: Sequence[Prompt], sampling: SamplingOptions) -> Future[Batch]:
        """Return a future of the conversations, `sampling.n` for each prompt.

        The policy's own tokens are in the mask, and the engine's fields are theirs. Turns after the first are drawn
        when the future is waited for. `sampling.max_new_tokens` counts all tokens after the prompt.

        Raises:
            ValueError: An environment raised, took too long or broke the protocol, and `--rewards.errors` is stop; the
                error names the prompt's row.
        """
        end_sessions()  # what is cached depends on this draw alone, also in a run that is resumed
        samples = self.begin(prompts, sampling)
        talk = Talk(self, file, samples)
        begins = self.once(talk.begin)
        for sample, begin in zip(samples, begins, strict=True):
            sample.tokens = begin or sample.tokens
        if not any(begins):  # the samples of a prompt share its computation
            rows, visual = [prompt.tokens for prompt in prompts], tuple(x.visual for x in samples[:: sampling.n])
            drawing = self.engine.generate_async(with_images(rows, visual), sampling)
        else:
            drawing = self.engine.generate_async(*next_call(samples, sampling, sampling.seed))
        return BatchFuture(partial(self._go_on, talk, sampling, drawing))

    def _go_on(self, talk: Talk, sampling: SamplingOptions, drawing: Future[Batch], batch_future: BatchFuture) -> Batch:
        samples = talk.samples
        drawn, pending = list(range(len(samples))), True
        for call in itertools.count(1):
            if drawn:
                batch = drawing.result()
                if call == 1:  # the oldest weights that draw
                    batch_future.drawn_anew = getattr(drawing, "drawn_anew", False)
                take_parts([samples[number] for number in drawn], batch)
            elif not pending:
                break
            answers, pending = self.once(partial(talk.answers, drawn))
            drawn = []
            for number, numbers, messages in answers:
                samples[number].numbers.append(numbers)
                if messages is not None:
                    samples[number].tokens = [*samples[number].tokens, *messages]
                    drawn.append(number)
            if drawn:
                open_samples, seed = [samples[number] for number in drawn], sampling.seed + (call << 40)
                drawing = self.engine.generate_async(*next_call(open_samples, sampling, seed))
        end_sessions()
        return batch_of_conversations(samples)


@dataclass
class Talk:
    """The environments of one draw; used on one rank.

    Attributes:
        owner: The options, the tokenizer and the environments.
        file: The file of the prompts, for errors.
        samples: The conversations.
    """

    owner: Conversations
    file: Path
    samples: list[Conversation]
    _steps: dict[Future[Turn], int] = field(default_factory=dict)

    def begin(self) -> list[list[int] | None]:
        """Make the environments; return the tokens of each conversation, or None to begin with its prompt."""
        asked = [self.ask(sample, "reset", dict(sample.prompt.row)) for sample in self.samples]
        return [self.begun(sample, future.result()) for sample, future in zip(self.samples, asked, strict=True)]

    def begun(self, sample: Conversation, turn: Turn) -> list[int] | None:
        """Return the tokens with which an environment begins a conversation; None: with its prompt."""
        sample.failed = self._fails(sample, turn.error)
        if sample.failed or not turn.messages:
            return None
        if sample.prompt.chat is not None:
            raise ValueError(
                f"{self._place(sample)}: the environment begins with messages, which would replace "
                "a prompt with images; return no messages from reset() there"
            )
        tokens = self._tokens(sample, turn.messages, partial(self.owner.checked_run.codec.chat, tools=None))
        if tokens is not None and len(tokens) >= sample.limit:
            raise ValueError(
                f"{self._place(sample)}: the environment begins with {len(tokens)} tokens, which leave no room "
                f"for a response: the prompt of the row has {len(sample.prompt.tokens)} and --max-new-tokens is "
                f"{self.owner.checked_run.options.sampling.max_new_tokens}"
            )
        return tokens

    def answers(self, drawn: Sequence[int]) -> tuple[list[tuple[int, list[float], list[int] | None]], bool]:
        """Have the environments answer the new turns of the samples `drawn`, and return the answers that are there.

        Returns:
            For each answer the sample, the numbers of its turn (`COLUMNS`), and the tokens of the messages, or None at
            the end of the conversation; and whether other answers are pending.
        """
        for number in drawn:
            self._steps[self.step(self.samples[number])] = number
        done, _ = wait(self._steps, _PATIENCE_SECONDS)
        if not done:
            done, _ = wait(self._steps, return_when=FIRST_COMPLETED)
        turns = {self._steps.pop(future): future.result() for future in done}
        return [(number, *self.answer(self.samples[number], turns[number])) for number in sorted(turns)], bool(
            self._steps
        )

    def step(self, sample: Conversation) -> Future[Turn]:
        """Ask the environment for its answer to the last part of a conversation."""
        if sample.failed:
            failed: Future[Turn] = Future()
            failed.set_result(Turn(error="failed in reset"))
            return failed
        begin, end, _ = sample.parts[-1]
        ids, codec = sample.tokens[begin:end], self.owner.checked_run.codec
        reason = "length" if self._cut(sample) else "stop"
        response = Response(codec.decode(ids), codec.decode(ids, special=True), ids, reason)
        last = sample.room < 1 or len(sample.parts) >= self.owner.checked_run.options.data.max_turns
        # A template may begin an answer with a thought.
        thinking = codec.decode(sample.tokens[:begin][-_TAIL:], special=True).rstrip().endswith(("<think>", "[THINK]"))
        return self.ask(sample, "step", response, last=last, thinking=thinking)

    def answer(self, sample: Conversation, turn: Turn) -> tuple[list[float], list[int] | None]:
        """Return the numbers of a turn (`COLUMNS`), and the tokens that follow it; None at the end."""
        failed = sample.failed or self._fails(sample, turn.error)
        cut, tokens = turn.cut or self._cut(sample), None
        if turn.messages and not failed:
            render = partial(self.owner.checked_run.codec.continuation, last=sample.tokens[-1])
            tokens = self._tokens(sample, turn.messages, render)
            if tokens is None or len(tokens) >= sample.room:
                cut, failed, tokens = cut or tokens is not None, tokens is None, None
                failed = self._fails(sample, self.ask(sample, "close").result().error) or failed
        return [1.0, turn.reward, turn.tool_errors, float(cut), float(failed)], tokens

    def _cut(self, sample: Conversation) -> bool:
        """Say whether the length limit ended the last turn."""
        return sample.room < 1 and sample.tokens[-1] not in self.owner.checked_run.stop_ids

    def ask(self, sample: Conversation, asks: str, value: Any = None, **flags: bool) -> Future[Turn]:
        """Send a request to the environment; see `Environments.ask`."""
        rewards = self.owner.rewards
        assert rewards is not None
        assert rewards.environments is not None
        return rewards.environments.ask(sample.key, asks, value, **flags)

    def _fails(self, sample: Conversation, error: str | None) -> bool:
        """Say whether an environment failed; ValueError for the first failure unless failures count as 0."""
        if error is None:
            return False
        text = f"{self._place(sample)}: the environment {error}"
        if self.owner.checked_run.options.rewards.errors == "stop":
            raise ValueError(text)
        self.owner.tell(f"an environment failed, and its conversation counts as 0; {text}")
        return True

    def _tokens(
        self, sample: Conversation, messages: Sequence[Any], render: Callable[..., list[int]]
    ) -> list[int] | None:
        """Return the tokens of messages; None where the template refuses them and failures count as 0."""
        try:
            return render(messages)
        except ValueError as error:
            if self._fails(sample, f"said {list(messages)!r:.200}; {error}"):
                sample.failed = True
            return None

    def _place(self, sample: Conversation) -> str:
        return place(self.file, sample.prompt.line)


def batch_of_conversations(samples: Sequence[Conversation]) -> Batch:
    """Return conversations with the policy's own tokens in the mask, and the field `TURNS`."""
    batch = batch_of(samples)
    turns = torch.zeros(batch.num_tokens, len(COLUMNS))
    starts = itertools.accumulate(batch.lengths, initial=0)
    for start, sample in zip(starts, samples, strict=False):
        for (_, end, _), numbers in zip(sample.parts, sample.numbers, strict=True):
            turns[start + end - 1] = torch.tensor(numbers)
    return batch.with_fields(**{TURNS: turns})
