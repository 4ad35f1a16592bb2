"""`Choice`: a response that grows, drawn by a service, with stop texts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from operator import itemgetter

from parallel_layers.module import hashed_seed
from parallel_models import SamplingOptions
from rl_train.data.codec import TextCodec
from rl_train.engines.interface import Request, Response
from rl_train.gateway.errors import ApiError, episode_ended
from rl_train.gateway.service import EngineService
from rl_train.trajectories.samples import joined_routing

# Tokens that are drawn at a time where a client waits for parts of the text, or for a stop text.
_PART_TOKENS = 32


class NotFiniteError(ApiError):
    """The engine drew a token whose log-prob is NaN or infinite: nothing can be learned from the episode."""


@dataclass(frozen=True)
class Drawing:
    """The request of a client, in ids.

    Attributes:
        prompt: The tokens of the prompt.
        sampling: How tokens are drawn; `stop_ids` end a response.
        limit: The largest number of tokens of a response.
        count: The number of responses.
        seed: The seed of the responses.
        stops: Texts that end a response; the client gets the text before the first of them.
        parts: Whether the client waits for parts of the text.
        text: Whether the client gets a text.
    """

    prompt: list[int]
    sampling: SamplingOptions
    limit: int
    count: int
    seed: int
    stops: tuple[str, ...] = ()
    parts: bool = False
    text: bool = True


@dataclass
class Choice:
    """A response so far.

    Attributes:
        index: The number of the response among those of a call.
        response: The tokens and their fields.
        text: The text for the client, without special tokens and stop texts.
        finish: The end: "stop" or "length"; None before.
        stop: The stop text that ended the response; None where another end did.
    """

    index: int
    response: Response = field(default_factory=lambda: Response([], []))
    text: str = ""
    finish: str | None = None
    stop: str | None = None


@dataclass(frozen=True)
class Sampler:
    """Draws choices by a service.

    Attributes:
        service: The engine.
        codec: The tokenizer.
        seconds: The time limit of a call.
    """

    service: EngineService
    codec: TextCodec
    seconds: float

    async def grow(self, drawing: Drawing, begun: Callable[[Future[Response]], None]) -> AsyncGenerator[Choice, None]:
        """Yield all choices as they grow, each the last time with its `finish`.

        Args:
            drawing: What to draw.
            begun: Takes the requests of the engine, which the end of the episode cancels.

        Raises:
            ApiError: The call takes longer than its limit, or the episode has ended.
            NotFiniteError: The engine drew a log-prob that is not finite.
        """
        loop = asyncio.get_running_loop()
        deadline, waiting = loop.time() + self.seconds, dict[asyncio.Future[Response], Choice]()

        def draw(choice: Choice) -> None:
            request = self._request(drawing, choice)
            waiting[asyncio.wrap_future(request)] = choice
            begun(request)

        try:
            for index in range(drawing.count):
                draw(Choice(index))
            while waiting:
                limit = deadline - loop.time()
                done, _ = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise ApiError(504, f"the call took longer than {self.seconds:g} s", code="deadline")
                for request in sorted(done, key=lambda request: waiting[request].index):
                    choice = waiting.pop(request)
                    if request.cancelled():
                        raise episode_ended()
                    _check(part := request.result())
                    seen = len(choice.response.tokens)
                    choice.response = joined(choice.response, part)
                    self._end(choice, drawing, seen)
                    if choice.finish is None:
                        draw(choice)
                    yield choice
        finally:
            for request in waiting:
                if not request.cancel() and not request.cancelled():
                    request.exception()  # the error of another request is raised

    def _request(self, drawing: Drawing, choice: Choice) -> Future[Response]:
        """Have the engine draw the next tokens of a choice."""
        tokens = choice.response.tokens
        prompt = drawing.prompt + tokens
        room = drawing.limit - len(tokens)
        if drawing.parts or drawing.stops:
            room = min(room, _PART_TOKENS)
        request = Request(prompt, hashed_seed(drawing.seed, choice.index, len(tokens), size=7))
        return self.service.submit(request, replace(drawing.sampling, n=1, max_length=len(prompt) + room))

    def _end(self, choice: Choice, drawing: Drawing, seen: int) -> None:
        """Set the text, and the end where the last part has brought it.

        A stop text ends the response with the token that completes it; tokens behind it are dropped. That does not bias
        what is learned: whether a token stays depends on the tokens before it alone.
        """
        tokens = choice.response.tokens
        if drawing.text or drawing.stops:
            choice.text = self.codec.decode(tokens)
        if _first_stop(choice.text, drawing.stops) is not None:
            length, found = seen, None
            while found is None:
                length += 1
                choice.text = self.codec.decode(tokens[:length])
                found = _first_stop(choice.text, drawing.stops)
            place, choice.stop = found
            choice.response, choice.text, choice.finish = cut(choice.response, length), choice.text[:place], "stop"
        elif tokens and tokens[-1] in tuple(drawing.sampling.stop_ids):
            choice.finish = "stop"
        elif len(tokens) >= drawing.limit:
            choice.finish = "length"


def shown(choice: Choice, stops: Sequence[str]) -> str:
    """Return the text that no later token changes: without half a character or the beginning of a stop text."""
    if choice.finish is not None:
        return choice.text
    text = choice.text.rstrip("\ufffd")
    held = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
    return text[: len(text) - held]


def joined(first: Response, second: Response) -> Response:
    """Return two parts of a response as one."""
    kept = None if second.kept is None else [*(first.kept or ()), *second.kept]
    versions = None if second.versions is None else [*(first.versions or ()), *second.versions]
    tokens, log_probs = first.tokens + second.tokens, first.log_probs + second.log_probs
    routing = joined_routing(first.routing, second.routing)
    return Response(tokens, log_probs, kept, versions, first.steps + second.steps, routing)


def cut(response: Response, length: int) -> Response:
    """Return the first tokens of a response."""
    tokens, log_probs, kept, versions, steps, routing = response
    return Response(
        tokens[:length], log_probs[:length], kept and kept[:length], versions and versions[:length], steps, routing
    )


def _check(part: Response) -> None:
    """Raise NotFiniteError for log-probs that are NaN or infinite; JSON has neither."""
    for token, log_prob in zip(part.tokens, part.log_probs, strict=True):
        if not math.isfinite(log_prob):
            raise NotFiniteError(
                500,
                f"the engine drew the token {token} with the log-prob {log_prob}, from which nothing can be learned: "
                "the episode fails; check the weights and the dtype of the engine",
                code="log_prob_not_finite",
            )


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return the first stop text in a text, behind its place; None without."""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found, key=itemgetter(0), default=None)
