"""The process of environments, from inside: hold the environments of samples, and answer requests concurrently.

The process imports neither torch nor the models, so that it starts as fast as the user's module.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, Protocol

from rl_train.environments.protocol import Environment, Step
from rl_train.environments.tools import FORMATS, Call, calls_in
from rl_train.processes.child import forks_leave
from rl_train.processes.errors import cut, encodable, shown
from rl_train.processes.worker import Calls, Pipe, ReceivedCall
from rl_train.rewards.worker import checked, late, load, raised

# Calls that run at the same time in one process.
_MOST_AT_ONCE = 64
# Characters of the result of a tool, which is cut there, and of all messages of an answer, which is refused.
_MOST_RESULT, _MOST_MESSAGES = 2**20, 2**24


class Request(NamedTuple):
    """A request for the environment of a sample, with the limit of each of its calls in seconds.

    `value` is the row for "reset" and the response for "step". `last`: no further response will be drawn. `thinking`:
    the response begins within the model's thoughts.
    """

    sample: int
    asks: Literal["reset", "step", "close", "schemas"]
    limit: float
    value: Any = None
    last: bool = False
    thinking: bool = False


class Turn(NamedTuple):
    """The answer to a request: the next messages (for "schemas": the tools' schemas), and the reward.

    `cut`: the environment would have gone on after the last response. `error`: the failure of the environment.
    """

    messages: list[dict[str, Any]] = []  # noqa: RUF012  # never changed
    reward: float = 0.0
    tool_errors: int = 0
    cut: bool = False
    error: str | None = None


def serve(pipe: Pipe) -> None:
    """Import a class, and answer each call "answer" with a `Request` by a `Turn`, several at the same time.

    The process gives signs of life as long as its event loop runs.
    """
    calls = Calls(pipe)
    if (host := load(calls, _Host)) is not None:
        asyncio.run(answer_all(calls, host))


class Host(Protocol):
    """The object in a process of the user's code that answers calls."""

    async def answer(self, *arguments: Any) -> Any:
        """Return the answer to a call."""


async def answer_all(calls: Calls, host: Host) -> None:
    """Answer each call by the host, several at the same time; signs of life show that the event loop runs."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(call: ReceivedCall) -> None:
        try:
            turn = await host.answer(*call.arguments())
        except BaseException as error:  # every request gets an answer
            turn = Turn(error=raised(error, None))
        call.answer(turn)

    def begin(call: ReceivedCall) -> None:
        task = asyncio.create_task(answer(call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def listen() -> None:
        for call in calls:
            loop.call_soon_threadsafe(begin, call)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=listen, daemon=True).start()
    calls.send_signs(loop.call_soon_threadsafe)
    await ended.wait()


class _Host:
    """The environments of a process by the number of their sample."""

    def __init__(self, kind: Any) -> None:
        if not (isinstance(kind, type) and issubclass(kind, Environment)):
            raise TypeError(
                f"{getattr(kind, '__name__', kind)} must be a subclass of rl_train.environments.Environment"
            )
        self._kind, self._file = kind, getattr(sys.modules.get(kind.__module__), "__file__", None)
        self._environments: dict[int, Environment] = {}
        self._slots = asyncio.Semaphore(_MOST_AT_ONCE)

    async def answer(self, request: Request) -> Turn:
        """Return the answer to a request. An environment whose conversation has ended is closed."""
        turn = await self._answer(request)
        ends = request.last or turn.error is not None or (request.asks in ("step", "close") and not turn.messages)
        environment = self._environments.pop(request.sample, None) if ends else None
        if environment is not None:
            _, error = await self._call(request.limit, environment.close)
            turn = turn if turn.error or not error else Turn(error=f"{error} in close")
        return turn

    async def _answer(self, request: Request) -> Turn:
        limit = request.limit
        if request.asks in ("reset", "schemas"):
            instance, error = await self._call(limit, self._kind)
            if error is not None:
                return Turn(error=f"{error} in __init__")
            if request.asks == "schemas":
                # In a thread: importing transformers would block the event loop for too long.
                return await asyncio.to_thread(_schemas, instance)
            self._environments[request.sample] = instance
            messages, error = await self._call(limit, instance.reset, request.value)
            if error is None:
                messages, error = plain_messages(messages)
            return Turn(messages, error=error and f"{error} in reset")
        environment = self._environments.get(request.sample)
        if environment is None:
            return Turn(error="was lost when its process ended")
        if request.asks == "close":
            return Turn()
        calls = (
            calls_in(request.value.raw, environment.tool_format, thinking=request.thinking) if environment.tools else []
        )
        if calls and not request.last:
            answers = await asyncio.gather(*(self._tool(environment, call, limit) for call in calls))
            return Turn([message for message, _ in answers], tool_errors=sum(failed for _, failed in answers))
        step, error = await self._call(limit, environment.step, request.value)
        if error is None and not isinstance(step, Step):
            error = f"returned {shown(step)}, which is no Step,"
        if error is None:
            error = checked(step.reward).error
        if error is None:
            messages, error = plain_messages(step.messages)
        if error is not None:
            return Turn(error=f"{error} in step")
        return Turn(
            [] if request.last else messages, float(step.reward), cut=bool(request.last and (calls or messages))
        )

    async def _tool(self, environment: Environment, call: Call, limit: float) -> tuple[dict[str, Any], bool]:
        """Return the message of a tool, and whether the call failed; after a failure the message is the error."""
        tools = {tool.__name__: tool for tool in environment.tools}
        value, error = None, call.error
        if error is None and call.name not in tools:
            error = f"there is no tool {call.name!r}; the tools are {', '.join(tools)}"
        if error is None:
            try:
                inspect.signature(tools[call.name]).bind(**call.arguments)
            except TypeError as mistake:
                error = str(mistake)
        if error is None:
            value, error = await self._call(limit, tools[call.name], **call.arguments)
        if error is None and not isinstance(value, str):
            value, error = await self._call(limit, json.dumps, value, default=str)
        text = str(value) if error is None else f"error: {error}"
        return {"role": "tool", "name": encodable(call.name), "content": cut(text, _MOST_RESULT)}, error is not None

    async def _call(
        self, limit: float, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, str | None]:
        """Return the result of a function or its error; functions that are not `async` run in a thread."""
        async with self._slots:
            call = asyncio.create_task(called(self._file, function, *args, **kwargs))
            done, _ = await asyncio.wait({call}, timeout=limit)
        if not done:
            call.cancel()  # not awaited: the function may catch this
            return None, late(limit)
        return call.result()


async def called(
    file: str | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> tuple[Any, str | None]:
    """Return the result of a function of the user's `file`, or its error; one that is not `async` runs in a thread."""
    try:
        with forks_leave():
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs), None
            value, error = await _in_thread(function, *args, **kwargs)
            if error is not None:
                raise error
            return await value if inspect.isawaitable(value) else value, None
    except BaseException as error:
        return None, raised(error, file)


def _in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
    """Return a future of (result, exception) of a function.

    Each call has its own thread; a thread that hangs is abandoned.
    """
    future: Future[tuple[Any, BaseException | None]] = Future()
    future.set_running_or_notify_cancel()  # an abandoned thread may still set the result

    def run() -> None:
        try:
            with forks_leave():
                outcome = function(*args, **kwargs), None
        except BaseException as error:
            future.set_result((None, error))
        else:
            future.set_result(outcome)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(future)


def plain_messages(value: Any) -> tuple[list[dict[str, Any]], str | None]:
    """Return messages as JSON values, and an error if they are none; None stands for no messages."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    messages = [] if value is None else list(value) if isinstance(value, list | tuple) else [None]
    if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages):
        return [], f'returned {shown(value)}; messages are a text or a list of {{"role": ..., "content": ...}}'
    try:
        text = json.dumps(messages, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        return [], f"returned messages that are not JSON ({shown(error, str)})"
    if len(text) > _MOST_MESSAGES:
        return [], f"returned messages of {len(text)} characters, and {_MOST_MESSAGES} are the most"
    return json.loads(encodable(text)), None


def _schemas(environment: Environment) -> Turn:
    """Return the JSON schemas of the tools."""
    if environment.tool_format not in FORMATS:
        return Turn(error=f"tool_format={environment.tool_format!r} must be one of {', '.join(FORMATS)}")
    if not environment.tools:
        return Turn()
    from transformers.utils import get_json_schema  # takes a second, and only this request needs it

    try:
        return Turn([get_json_schema(tool) for tool in environment.tools])
    except Exception as error:  # transformers raises several classes
        return Turn(error=f"the tools need type hints and a docstring with Args: {type(error).__name__}: {error}")
