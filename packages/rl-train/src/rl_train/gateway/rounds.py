"""`RoundService`: requests wait for the next call of an engine that all ranks of a run call together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition
from typing import Any, NamedTuple

from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train.engines.interface import VERSION, Request, Response
from rl_train.gateway.drawing import cut, joined
from rl_train.gateway.service import finish
from rl_train.trajectories.samples import SAMPLING_MASK, parts_of

# Seconds in which requests join the first one of a round: agents that get answers at the same time ask again soon.
_JOIN_SECONDS = 0.01


class Round(NamedTuple):
    """The prompts of a call of the engine, and the largest number of tokens of a response."""

    prompts: list[list[int]]
    most: int


@dataclass
class _Waiting:
    """A request, and what is drawn so far."""

    future: Future[Response]
    request: Request
    sampling: SamplingOptions
    response: Response = field(default_factory=lambda: Response([], []))

    @property
    def room(self) -> int:
        """Return the number of tokens that may follow."""
        return self.sampling.limit(len(self.request.prompt)) - len(self.response.tokens)


class RoundService:
    """An `EngineService` for any `RolloutEngine`, whose `generate` all ranks call together.

    The rank with the service asks for a round by `wait` and answers it by `give`. An engine that keeps keys and values
    draws a few tokens of each response in a round; the responses go on in the next one, beside new requests.

    Args:
        tokens: The number of tokens of a round; None: whole responses.
    """

    def __init__(self, tokens: int | None) -> None:
        self._tokens, self._changed = tokens, Condition()
        self._waiting, self._drawn = list[_Waiting](), list[_Waiting]()

    def submit(self, request: Request, sampling: SamplingOptions) -> Future[Response]:
        """See `EngineService`."""
        waiting = _Waiting(Future(), request, sampling)
        waiting.room  # noqa: B018  # ValueError without room
        with self._changed:
            self._waiting.append(waiting)
            self._changed.notify_all()
        return waiting.future

    def notify(self) -> None:
        """Have `wait` call `ended` again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Do nothing: the engine is the run's."""

    def wait(self, ended: Callable[[], bool]) -> Round | None:
        """Wait for requests, and return the next round; None once `ended` returns True."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or ended())
                if ended():
                    return None
            time.sleep(_JOIN_SECONDS)
            with self._changed:
                self._drawn = [waiting for waiting in self._waiting if not waiting.future.cancelled()]
                self._waiting = []
            if self._drawn:
                room = max(waiting.room for waiting in self._drawn)
                prompts = [waiting.request.prompt + waiting.response.tokens for waiting in self._drawn]
                return Round(prompts, room if self._tokens is None else min(room, self._tokens))

    def give(self, batch: Batch, stop_ids: Sequence[int]) -> None:
        """Answer the requests of the last round by a sequence each; tokens beyond a request's limit are dropped."""
        begins = [len(waiting.request.prompt) + len(waiting.response.tokens) for waiting in self._drawn]
        for waiting, part in zip(self._drawn, parts_of(batch, begins), strict=True):
            fields: dict[str, Any] = {name: values.tolist() for name, values in part.fields.items()}
            log_probs, kept, versions = fields["log_probs"], fields.get(SAMPLING_MASK), fields.get(VERSION)
            new = Response(part.tokens, log_probs, kept, versions, routing=part.routing)
            waiting.response = joined(waiting.response, cut(new, waiting.room))
            if waiting.room < 1 or waiting.response.tokens[-1] in stop_ids:
                finish(waiting.future, waiting.response)
            else:
                self._waiting.append(waiting)
        self._drawn = []
