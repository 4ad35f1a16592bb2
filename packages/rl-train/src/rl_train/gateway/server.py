"""`Gateway`: the endpoint of a run, on a socket of this machine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from pydantic import TypeAdapter

from rl_train.data.codec import TextCodec
from rl_train.gateway.anthropic import CountTokens, Messages
from rl_train.gateway.bodies import RewardBody, read
from rl_train.gateway.chat import Chat
from rl_train.gateway.dialects import Completion, Dialect, Generate
from rl_train.gateway.drawing import Choice, Drawing, Sampler, shown
from rl_train.gateway.errors import ApiError, episode_ended
from rl_train.gateway.responses import Responses
from rl_train.gateway.service import EngineService
from rl_train.gateway.sessions import Session
from rl_train.trajectories.samples import part_of

# Starlette and uvicorn are the extra `gateway`.
if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_DIALECTS: dict[str, type[Dialect]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    "/v1/messages/count_tokens": CountTokens,
    "/inference/v1/generate": Generate,
}
_MODELS, _REWARD = "/v1/models", "/v1/reward"
_SERVED = f"POST {', '.join([*_DIALECTS, _REWARD])} and GET {_MODELS}"
# The first part of the path of a client that cannot choose its key.
_PREFIX = "/sessions/{key}"
_JSON = TypeAdapter[Any](Any)
_MODEL, _LOOPBACK = "policy", "127.0.0.1"
# The number of ended sessions whose keys are known: the newest, of 64 steps with 1 024 episodes each. An agent that was
# left behind calls within that time. A key is kept as its digest; all together take 7 MB.
_MOST_ENDED = 2**16


def require_gateway() -> None:
    """Raise ValueError unless the extra `gateway` is installed."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ValueError(f"the endpoint of agents needs {' and '.join(missing)}; pip install 'rl-train[gateway]'")


class Gateway:
    """The endpoint of a run: clients draw from its engine, each in a session.

    A client needs the key of a session, as bearer token or in the path (`Gateway.base_url`). The options of the draws
    are those of the session; the header `x-overridden` of an answer names the client's options that differ.

    Args:
        service: The engine.
        codec: The tokenizer of the policy.
        context: The largest number of tokens of a prompt with its response.
        seconds: The time limit of a call.
        most_bytes: The largest size of a request.

    Attributes:
        url: The address, `http://HOST:PORT`; after `start`.
    """

    def __init__(
        self,
        service: EngineService,
        codec: TextCodec,
        *,
        context: int,
        seconds: float = 600.0,
        most_bytes: int = 2**24,
    ) -> None:
        self._sampler, self._context, self._most_bytes = Sampler(service, codec, seconds), context, most_bytes
        self._sessions, self._ended = dict[str, Session](), dict[bytes, None]()
        self._ending = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self.url = ""

    def start(self) -> None:
        """Listen in a thread, on a free port of the loopback device; ImportError without the extra `gateway`."""
        import uvicorn  # of the extra

        listener = socket.create_server((_LOOPBACK, 0), backlog=2048)
        self.url = f"http://{_LOOPBACK}:{listener.getsockname()[1]}"
        config = uvicorn.Config(self.app(), log_level="warning", access_log=False, lifespan="off", ws="none")
        self._server, started = uvicorn.Server(config), threading.Event()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            started.set()
            await self._server.serve(sockets=[listener])

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True, name="gateway")
        self._thread.start()
        started.wait()

    def close(self) -> None:
        """End all sessions, and stop listening."""
        for session in list(self._sessions.values()):
            self.end(session)
        if self._server is not None and self._thread is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(10.0)
            self._server = None

    def add(self, session: Session) -> Session:
        """Let clients with the session's key draw."""
        self._sessions[session.key] = session
        return session

    def base_url(self, session: Session) -> str:
        """Return the base URL for OpenAI's clients; it has the session's key."""
        return f"{self.url}{_PREFIX.format(key=session.key)}/v1"

    def end(self, session: Session) -> None:
        """End a session: what it draws ends, later calls are refused, and its record changes no more."""
        with self._ending:
            self._ended[_digest(session.key)] = None
            if len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
            self._sessions.pop(session.key, None)
        session.end()

    def app(self) -> Starlette:
        """Return the ASGI application."""
        from starlette.applications import Starlette  # of the extra
        from starlette.exceptions import HTTPException
        from starlette.routing import Mount, Route

        async def failed(request: Request, error: Exception) -> Response:
            path = re.sub(_PREFIX.format(key="[^/]*"), "", request.url.path)
            if isinstance(error, HTTPException):
                message = f"{request.method} {path!r:.100} is not served; give one of {_SERVED}"
                error = ApiError(error.status_code, message)
            answered = ApiError.of(error, getattr(request.state, "call", path))
            form = Messages if path.startswith("/v1/messages") else Dialect
            return _json(form.error(answered), answered.status)

        def route(path: str, serve: Callable[[Request], Awaitable[Response]], method: str) -> Route:
            async def answer(request: Request) -> Response:
                try:
                    return await serve(request)
                except Exception as error:  # Starlette would answer, and raise it again for uvicorn to print
                    return await failed(request, error)

            return Route(path, answer, methods=[method])

        routes: list[Any] = [route(path, partial(self._answer, of), "POST") for path, of in _DIALECTS.items()]
        routes += [route(_REWARD, self._reward, "POST")]
        routes += [route(path, self._models, "GET") for path in (_MODELS, _MODELS + "/{model:path}")]
        handlers: dict[Any, Any] = {HTTPException: failed}
        return Starlette(routes=[*routes, Mount(_PREFIX, routes=routes)], exception_handlers=handlers)

    def _session(self, request: Request) -> Session:
        """Return the session of a request's key: in its path, its bearer token, or a header.

        Anthropic's clients send x-api-key, verifiers' clients the id of a trace as x-session-id.
        """
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        headers = (request.headers.get(name, "") for name in ("x-api-key", "x-session-id"))
        named = request.path_params.get("key")
        keys = (named,) if named else (bearer, *headers)
        for key in keys:
            if (session := self._sessions.get(key)) is not None:
                return session
        if any(_digest(key) in self._ended for key in keys):
            raise episode_ended()
        raise ApiError(401, "the key is that of no open session; give the session's key", code="invalid_api_key")

    async def _models(self, request: Request) -> Response:
        self._session(request)
        entry = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "rl-train"}
        entry |= {"max_model_len": self._context, "root": str(self._sampler.codec.file.parent)}
        if (name := request.path_params.get("model")) is None:
            return _json({"object": "list", "data": [entry]})
        _check_model(name)
        return _json(entry)

    async def _reward(self, request: Request) -> Response:
        """Take the reward of an episode from its client."""
        session = self._session(request)
        reward = read(RewardBody, await self._body(request)).reward
        with session.going_on():
            session.reward = reward
        return _json({"reward": reward})

    async def _answer(self, dialect: type[Dialect], request: Request) -> Response:
        session = self._session(request)
        call = dialect(await self._body(request), self._sampler.codec, session)
        request.state.call = call.id
        _check_model(call.model)
        overridden = call.sampled.check(session.sampling) + call.overridden
        with session.going_on():
            session.overridden.update(overridden)
        headers = {"x-overridden": ",".join(overridden)} if overridden else {}
        if not call.draws:
            return _json(call.reply(()), headers=headers)
        drawing = self._drawing(call, session)
        if call.stream:
            return await _stream(call, self._events(call, drawing, session), headers)
        return _json(await _unless_gone(self._whole(call, drawing, session), request), headers=headers)

    async def _body(self, request: Request) -> Any:
        """Return the JSON values of a request."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._most_bytes:
                raise ApiError(413, f"the request has more than {self._most_bytes} bytes", code="request_too_large")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None

    @cached_property
    def _largest_token(self) -> int:
        return max(self._sampler.codec.vocabulary.values())

    def _drawing(self, call: Dialect, session: Session) -> Drawing:
        """Return what a call draws, within the limits of the run."""
        room = self._context - len(call.recorded.tokens)
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {len(call.recorded.tokens)} tokens, and prompt and response at most {self._context}; "
                "shorten the prompt",
                call.field,
                "context_length_exceeded",
            )
        if (largest := max(call.recorded.tokens)) > self._largest_token:
            raise ApiError(
                400, f"the prompt has the token {largest}, and the largest is {self._largest_token}", "prompt"
            )
        limit = min(room, session.sampling.max_new_tokens, call.limit or room)
        seed = session.draw_seed(call.recorded.tokens, call.sampled.seed)
        count, stops = call.sampled.n or 1, call.sampled.stops
        return Drawing(call.recorded.tokens, session.sampling, limit, count, seed, stops, call.stream, call.text)

    async def _whole(self, call: Dialect, drawing: Drawing, session: Session) -> dict[str, Any]:
        with session.call(drawing) as (drawing, choices):
            grown = self._sampler.grow(drawing, session.wait_for)
            drawn = [choice async for choice in grown if choice.finish is not None]
            drawn.sort(key=lambda choice: choice.index)
            self._record(call, drawn, session)
            choices += drawn
        return call.reply(choices)

    async def _events(
        self, call: Dialect, drawing: Drawing, session: Session
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yield the events of a stream, the first ones before anything is drawn."""
        sent = [(0, 0)] * drawing.count  # of each choice: the characters and tokens that the client has
        with session.call(drawing) as (drawing, choices):
            yield call.begin()
            async with aclosing(self._sampler.grow(drawing, session.wait_for)) as grown:
                async for choice in grown:
                    text, (characters, tokens) = shown(choice, drawing.stops), sent[choice.index]
                    sent[choice.index] = max(len(text), characters), len(choice.response.tokens)
                    if choice.finish is not None:
                        self._record(call, [choice], session)
                        choices.append(choice)
                    yield call.grow(choice, text[characters:], tokens)
        yield call.end(choices)

    def _record(self, call: Dialect, choices: Sequence[Choice], session: Session) -> None:
        with session.going_on():
            for choice in choices:
                part, truncated = part_of(choice.response), choice.finish == "length"
                session.recorder.record(call.recorded, part, call.message(choice), truncated=truncated)


def _check_model(name: str | None) -> None:
    if name not in (None, _MODEL):
        raise ApiError(404, f"there is no model {name!r:.100}; the model is {_MODEL!r}", "model", "model_not_found")


async def _unless_gone(work: Awaitable[Any], request: Request) -> Any:
    """Return the result of a coroutine; when the client has gone, cancel it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    task, watch = cast(asyncio.Task[Any], asyncio.current_task()), asyncio.ensure_future(gone())
    try:
        return await work
    except asyncio.CancelledError:
        if not watch.done():
            raise
        task.uncancel()  # it answers by an error
        raise ApiError(499, "the client has gone") from None
    finally:
        watch.cancel()


async def _stream(
    call: Dialect, events: AsyncGenerator[list[dict[str, Any]], None], headers: dict[str, str]
) -> Response:
    """Return a stream of server-sent events; errors before the first event are raised, later ones are an event."""
    from starlette.responses import StreamingResponse  # of the extra

    first = await anext(events)

    async def texts() -> AsyncIterator[bytes]:
        async with aclosing(events):
            try:
                yield _text(first)
                async for later in events:
                    yield _text(later)
            except Exception as error:
                yield _text([call.late_error(ApiError.of(error, call.id))])
            else:
                yield call.last_event

    return StreamingResponse(texts(), media_type="text/event-stream", headers=headers)


def _digest(key: str) -> bytes:
    """Return the digest of a key, which opens nothing."""
    return hashlib.sha256(key.encode()).digest()


def _text(events: Sequence[dict[str, Any]]) -> bytes:
    """Return the text of events, each under its name where it has a type."""
    names = [f"event: {values['type']}\n".encode() if "type" in values else b"" for values in events]
    return b"".join(b"%bdata: %b\n\n" % (name, _encode(values)) for name, values in zip(names, events, strict=True))


def _json(values: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    from starlette.responses import Response  # of the extra

    return Response(_encode(values), status, headers, "application/json")


def _encode(values: Any) -> bytes:
    """Return values as JSON; a client's NaN becomes null."""
    try:
        return _JSON.dump_json(values)
    except ValueError:  # half of a surrogate pair, which JSON has as an escape
        return json.dumps(values).encode()
