"""`Session`: one episode of a client, with its key, its limits and its record."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from parallel_layers.module import crc_seed, hashed_seed
from parallel_models import SamplingOptions
from rl_train.gateway.drawing import Choice, Drawing, NotFiniteError
from rl_train.gateway.errors import ApiError, episode_ended
from rl_train.trajectories.recorder import Recorder


@dataclass(frozen=True)
class Limits:
    """The limits of an episode; None: no limit."""

    calls: int | None = None
    tokens: int | None = None


@dataclass
class Session:
    """One episode of a client; `end` may be called in any thread, and all else in that of the endpoint.

    Attributes:
        recorder: The calls of the episode.
        sampling: How tokens are drawn; `max_new_tokens` is the largest number of tokens of a response.
        seed: The seed of its draws.
        limits: The limits of calls and of drawn tokens.
        key: The client's secret.
        calls, tokens: The number of calls, and of tokens that are drawn or being drawn.
        reward: The reward that the client has reported.
        limited: The limit that ended the episode; empty if none did.
        failed: What went wrong in the endpoint, so that nothing can be learned from the episode; empty if nothing did.
        ended: Whether the episode has ended; nothing of it changes any more, and later calls are refused.
        overridden: The number of calls by the sampling options that the run has overridden in them.
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
    failed: str = ""
    ended: bool = False
    overridden: Counter[str] = field(default_factory=Counter)
    _drawn: Counter[int] = field(default_factory=Counter)
    conversations: dict[str | None, list[dict[str, Any]]] = field(default_factory=dict)
    _requests: set[Future[Any]] = field(default_factory=set, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Change the episode, which does not end meanwhile.

        Raises:
            ApiError: The episode has ended.
        """
        with self._lock:
            if self.ended:
                raise episode_ended()
            yield

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
            What the limits leave of the call, and a list that takes the choices that are recorded.

        Raises:
            ApiError: The limits of the episode leave no call, or no token for each response; or the episode has ended.
        """
        count, limit, choices = drawing.count, drawing.limit, list[Choice]()
        with self.going_on():
            if self.limits.calls is not None and self.calls >= self.limits.calls:
                raise self._over("calls", self.limits.calls)
            if self.limits.tokens is not None:
                limit = min(limit, (self.limits.tokens - self.tokens) // count)
                if limit < 1:
                    raise self._over("tokens", self.limits.tokens)
            self.calls += 1
            self.tokens += count * limit
        try:
            yield replace(drawing, limit=limit), choices
        except NotFiniteError as error:
            self.failed = str(error)
            raise
        finally:
            self.tokens += sum(len(choice.response.tokens) for choice in choices) - count * limit

    def wait_for(self, request: Future[Any]) -> None:
        """Take a request of the engine, which the end of the episode cancels.

        Raises:
            ApiError: The episode has ended.
        """
        with self.going_on():
            self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    def end(self) -> None:
        """End the episode, and the calls that are not answered."""
        with self._lock:
            self.ended = True
        for request in list(self._requests):
            request.cancel()

    def _over(self, what: str, limit: int) -> ApiError:
        self.limited = what
        return ApiError(400, f"the episode has its {limit} {what}; end it", code=f"episode_{what}")
