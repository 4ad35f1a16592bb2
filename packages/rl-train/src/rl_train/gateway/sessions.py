"""`Session`: one episode of a client, with its key, its limits and its record."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from parallel_layers.module import crc_seed, hashed_seed
from parallel_models import SamplingOptions
from rl_train.gateway.drawing import Choice, Drawing
from rl_train.gateway.errors import ApiError
from rl_train.trajectories.recorder import Recorder


@dataclass(frozen=True)
class Limits:
    """The limits of an episode; None: no limit."""

    calls: int | None = None
    tokens: int | None = None


@dataclass
class Session:
    """One episode of a client.

    Attributes:
        recorder: The calls of the episode.
        sampling: How tokens are drawn; `max_new_tokens` is the largest number of tokens of a response.
        seed: The seed of its draws.
        limits: The limits of calls and of drawn tokens.
        key: The client's secret.
        calls, tokens: The number of calls, and of tokens that are drawn or being drawn.
        reward: The reward that the client has reported.
        limited: The limit that ended the episode; empty if none did.
        ended: Whether the episode has ended; later calls are refused.
        overridden: The number of calls by the sampling options that the run has overridden in them.
        tasks: The tasks that draw.
        conversations: The messages up to a response and with it, by the id of the response, of `/v1/responses`.
    """

    recorder: Recorder
    sampling: SamplingOptions
    seed: int = 0
    limits: Limits = Limits()
    key: str = field(default_factory=lambda: secrets.token_hex(24))
    calls: int = 0
    tokens: int = 0
    reward: float | None = None
    limited: str = ""
    ended: bool = False
    overridden: Counter[str] = field(default_factory=Counter)
    _drawn: Counter[int] = field(default_factory=Counter)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    conversations: dict[str | None, list[dict[str, Any]]] = field(default_factory=dict)

    def draw_seed(self, prompt: Sequence[int], seed: int | None) -> int:
        """Return the seed of a call: the client's, or that of the prompt; equal prompts get different seeds in turn."""
        if seed is not None:
            return hashed_seed("client", seed, size=7)
        digest = crc_seed(*prompt)
        self._drawn[digest] += 1
        return hashed_seed(self.seed, digest, self._drawn[digest], size=7)

    @contextmanager
    def call(self, drawing: Drawing) -> Iterator[tuple[Drawing, list[Choice]]]:
        """Count a call.

        Yields:
            What the limits leave of the call, and a list that takes the complete choices.

        Raises:
            ApiError: The limits of the episode leave no call, or no token for each response; or the episode has ended.
        """
        count, limit = drawing.count, drawing.limit
        if self.ended:
            raise episode_ended()
        if self.limits.calls is not None and self.calls >= self.limits.calls:
            raise self._over("calls", self.limits.calls)
        if self.limits.tokens is not None:
            limit = min(limit, (self.limits.tokens - self.tokens) // count)
            if limit < 1:
                raise self._over("tokens", self.limits.tokens)
        self.calls += 1
        self.tokens += count * limit
        choices = list[Choice]()
        try:
            yield replace(drawing, limit=limit), choices
        finally:
            self.tokens += sum(len(choice.response.tokens) for choice in choices) - count * limit

    def end(self) -> None:
        """End the calls that are not answered."""
        self.ended = True
        for task in list(self.tasks):
            task.cancel()

    def _over(self, what: str, limit: int) -> ApiError:
        self.limited = what
        return ApiError(400, f"the episode has its {limit} {what}; end it", code=f"episode_{what}")


def episode_ended() -> ApiError:
    """Return the error of a call in an episode that has ended."""
    return ApiError(403, "the episode has ended; it takes no further calls", code="episode_ended")
