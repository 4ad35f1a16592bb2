"""`Choice`: a response that grows, drawn by a service, with stop texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parallel_layers.module import hashed_seed
from parallel_models import SamplingOptions
from rl_train.data.codec import TextCodec
from rl_train.engines.interface import Request, Response
from rl_train.gateway.service import EngineService
from rl_train.trajectories.samples import joined_routing

# Tokens that are drawn at a time where a client waits for parts of the text, or for a stop text.
_PART_TOKENS = 32


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
    """

    service: EngineService
    codec: TextCodec

    async def choice(self, drawing: Drawing, index: int) -> AsyncGenerator[Choice, None]:
        """Yield a choice as it grows; the last time with its `finish`."""
        choice, size = Choice(index), _PART_TOKENS if drawing.parts or drawing.stops else drawing.limit
        while choice.finish is None:
            tokens = choice.response.tokens
            prompt = drawing.prompt + tokens
            room = min(size, drawing.limit - len(tokens))
            request = Request(prompt, hashed_seed(drawing.seed, index, len(tokens), size=7))
            future = self.service.submit(request, replace(drawing.sampling, n=1, max_length=len(prompt) + room))
            part = await asyncio.wrap_future(future)
            choice.response = joined(choice.response, part)
            self._end(choice, drawing, len(tokens))
            yield choice

    async def grow(self, drawing: Drawing, tasks: set[asyncio.Task[Any]]) -> AsyncGenerator[Choice, None]:
        """Yield all choices as they grow, each the last time with its `finish`.

        Args:
            drawing: What to draw.
            tasks: Takes the tasks that draw, as long as they run; when they are cancelled, this raises CancelledError.
                The caller's task draws a single choice.
        """
        if drawing.count == 1:
            caller = asyncio.current_task()
            assert caller is not None
            tasks.add(caller)
            try:
                async for choice in self.choice(drawing, 0):
                    yield choice
            finally:
                tasks.discard(caller)
            return
        queue = asyncio.Queue[Choice | BaseException]()

        async def pump(index: int) -> None:
            try:
                async for choice in self.choice(drawing, index):
                    queue.put_nowait(replace(choice))
            except BaseException as error:
                queue.put_nowait(error)

        pumps = {asyncio.create_task(pump(index)) for index in range(drawing.count)}
        tasks |= pumps
        try:
            open_choices = drawing.count
            while open_choices:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                open_choices -= item.finish is not None
                yield item
        finally:
            for task in pumps:
                task.cancel()
            tasks -= pumps

    def _end(self, choice: Choice, drawing: Drawing, seen: int) -> None:
        """Set the text, and the end where the last part has brought it.

        A stop text ends the response with the token that completes it; tokens behind it are dropped. That does not bias
        what is learned: whether a token stays depends on the tokens before it alone.
        """
        tokens = choice.response.tokens
        if drawing.text or drawing.stops:
            choice.text = self.codec.decode(tokens)
        if _place(choice.text, drawing.stops) is not None:
            length = next(
                (
                    n
                    for n in range(seen + 1, len(tokens))
                    if _place(self.codec.decode(tokens[:n]), drawing.stops) is not None
                ),
                len(tokens),
            )
            choice.response = cut(choice.response, length)
            choice.text = self.codec.decode(tokens[:length])
            place = _place(choice.text, drawing.stops)
            choice.stop = next(stop for stop in drawing.stops if choice.text.startswith(stop, place))
            choice.text, choice.finish = choice.text[:place], "stop"
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


def _place(text: str, stops: Sequence[str]) -> int | None:
    """Return the place of the first stop text in a text; None without."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)
