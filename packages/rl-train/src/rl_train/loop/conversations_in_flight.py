"""`ConversationsInFlight`: conversations that go on while the policy learns, and weights that change meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, cast

import torch

from parallel_layers.head import SamplingMask
from parallel_layers.module import hashed_seed
from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train.data.prompts import Prompt
from rl_train.engines.engine_on_ranks import MOST_REPEATS, BatchFuture, EngineOnRanks, request_of
from rl_train.engines.in_flight import Drawing, InFlightPool
from rl_train.engines.interface import VERSION, Response, WeightsLostError
from rl_train.environments.worker import Turn
from rl_train.loop.conversations import Conversation, Conversations, Talk, batch_of_conversations
from rl_train.loop.samples import SAMPLING_MASK, PerToken

# Conversations as JSON: for each its tokens, its parts as lists, and the numbers of its turns.
_State = list[tuple[list[int], list[tuple[int, int, dict[str, Any]]], list[list[float]]]]
_DTYPES = {"log_probs": torch.float32, VERSION: torch.int64}


@dataclass
class ConversationsInFlight(Conversations):
    """Draw responses of several turns by engines in flight, each conversation as fast as its environment answers.

    A thread of the rank with the environments gives each turn to an `InFlightPool` when the environment has answered,
    also while the policy learns. Each token has the version of the weights that drew it.
    """

    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "conversations"))

    def draw(self, file: Path, prompts: list[Prompt], sampling: SamplingOptions) -> Future[Batch]:  # type: ignore[override]
        """See `Conversations`; the conversations begin at once, and the future waits for their end."""
        conversations = self.begin(prompts, sampling)
        engine = cast(EngineOnRanks, self.engine)
        talk = None if self.rewards is None else TalkInFlight(self, file, conversations, sampling, engine.pool)
        return BatchFuture(partial(self._end, conversations, talk, engine), talk)

    def _end(
        self, conversations: list[Conversation], talk: TalkInFlight | None, engine: EngineOnRanks, future: BatchFuture
    ) -> Batch:
        """Wait for the end of the conversations, and return them on all ranks."""

        def state() -> _State | None:
            assert talk is not None
            return talk.wait()

        for _ in range(1 + MOST_REPEATS):
            if (ended := self.once(state)) is not None:
                break
            engine.repeat_sync()
        else:
            raise RuntimeError(f"the engines were lost {1 + MOST_REPEATS} times while they drew conversations")
        for conversation, (tokens, parts, numbers) in zip(conversations, ended, strict=True):
            conversation.tokens, conversation.numbers = tokens, numbers
            conversation.parts = [
                (begin, end, {name: _per_token(name, values) for name, values in fields.items()})
                for begin, end, fields in parts
            ]
        return batch_of_conversations(conversations)


class TalkInFlight:
    """The conversations of one draw, on the rank with the environments; a `Pending`.

    All but `done`, `version` and `wait` runs in the owner's thread.
    """

    def __init__(
        self,
        owner: ConversationsInFlight,
        file: Path,
        conversations: list[Conversation],
        sampling: SamplingOptions,
        pool: InFlightPool,
    ) -> None:
        self._messages = list[str]()
        # A message goes to the terminal from the thread of the run alone.
        self._talk = Talk(replace(owner, tell=self._messages.append), file, conversations)
        self._owner, self._sampling, self._pool = owner, sampling, pool
        # The turns in flight by the number of the conversation, and the first ones, which have the oldest version.
        self._turns, self._first = dict[int, Drawing](), list[Drawing]()
        # The conversations that have not ended, and those whose turn no engine draws.
        self._open, self._lost = set(range(len(conversations))), set[int]()
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

    def wait(self) -> _State | None:
        """Return the conversations at their end; None: the engines need weights, and then another `wait`."""
        self._run(self._go_on).result()
        self._event.wait()
        for message in self._messages:
            self._owner.tell(message)
        self._messages.clear()
        if self._error is not None:
            raise self._error
        return None if self._open else [_state(conversation) for conversation in self._talk.samples]

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
        for number, conversation in enumerate(self._talk.samples):
            asked = self._talk.ask(conversation, "reset", dict(conversation.prompt.row))
            asked.add_done_callback(partial(self._run, self._begun, number))

    def _begun(self, number: int, turn: Future[Turn]) -> None:
        conversation = self._talk.samples[number]
        conversation.tokens = self._talk.begun(conversation, turn.result()) or conversation.tokens
        self._draw(number)

    def _draw(self, number: int) -> None:
        """Give the next turn of a conversation to an engine."""
        conversation = self._talk.samples[number]
        seed = hashed_seed(self._sampling.seed, number, len(conversation.parts), size=7, byteorder="big")
        request = request_of(conversation.tokens, seed, conversation.visual)
        sampling = replace(self._sampling, n=1, max_length=conversation.limit)
        try:
            with self._pool.lock:
                self._turns[number] = self._pool.begin([request], sampling, lambda: self._run(self._drawn, number))
        except WeightsLostError:
            self._lose(number)
            return
        if not conversation.parts:
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
        conversation = self._talk.samples[number]
        begin = len(conversation.tokens)
        conversation.take(conversation.tokens + response.tokens, _fields(begin, response, self._sampling))
        self._talk.step(conversation).add_done_callback(partial(self._run, self._answered, number))

    def _answered(self, number: int, turn: Future[Turn]) -> None:
        """Take an environment's answer: the next turn begins, or the conversation ends."""
        conversation = self._talk.samples[number]
        numbers, messages = self._talk.answer(conversation, turn.result())
        conversation.numbers.append(numbers)
        if messages is None:
            self._open.remove(number)
            if not self._open:
                self._event.set()
            return
        conversation.tokens = [*conversation.tokens, *messages]
        self._draw(number)


def _fields(begin: int, response: Response, sampling: SamplingOptions) -> dict[str, PerToken]:
    """Return the fields `[L, ...]` of a sequence whose response begins at a place."""
    fields: dict[str, PerToken] = {
        "log_probs": torch.tensor([0.0] * begin + response.log_probs),
        VERSION: torch.tensor([-1] * begin + (response.versions or [])),
    }
    if sampling.keep_sampling_mask:
        fields[SAMPLING_MASK] = SamplingMask.from_rows([*([] for _ in range(begin)), *(response.kept or [])])
    return fields


def _per_token(name: str, values: list[Any]) -> PerToken:
    if name == SAMPLING_MASK:
        return SamplingMask.from_rows(values)
    return torch.tensor(values, dtype=_DTYPES[name])


def _state(conversation: Conversation) -> Any:
    parts = [
        (begin, end, {name: values.tolist() for name, values in fields.items()})
        for begin, end, fields in conversation.parts
    ]
    return conversation.tokens, parts, conversation.numbers
