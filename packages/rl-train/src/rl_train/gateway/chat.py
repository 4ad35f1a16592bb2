"""Chats: the messages and tools of a request, the message of its answer, and `/v1/chat/completions`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from parallel_layers.module import hashed_seed
from rl_train.data.chat import name_of
from rl_train.gateway.bodies import ChatBody, read
from rl_train.gateway.dialects import Completions, Dialect
from rl_train.gateway.drawing import Choice
from rl_train.gateway.errors import ApiError, invalid, unsupported
from rl_train.gateway.messages import PlacedMessage, checked_messages
from rl_train.gateway.tool_calls import answer, format_of


class ChatDialect(Dialect):
    """A request that is a chat.

    Attributes:
        messages: The messages, in the form of chat completions.
        tools: The tools that the model may call, in the same form; None without.
    """

    field = "messages"

    def message(self, choice: Choice) -> dict[str, Any]:
        """See `Dialect`."""
        if choice.index not in self._answers:
            self._answers[choice.index] = self._answer(choice)
        return self._answers[choice.index]

    def finish(self, choice: Choice) -> str | None:
        """Return the end of a choice: "stop", "length" or "tool_calls"; None before."""
        return "tool_calls" if choice.finish and "tool_calls" in self.message(choice) else choice.finish

    def _take_chat(
        self,
        messages: Sequence[PlacedMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: Any,
        several_calls: bool,
    ) -> None:
        """Take the chat; a choice that forces a call has no effect; tools that the template drops are refused.

        Without `several_calls` the client gets the first call of an answer. The sample keeps the others as drawn.
        """
        self._several_calls = several_calls
        if tool_choice in ("required", "any"):
            self.overridden.append("tool_choice")
        elif tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", f"tool_choice={tool_choice!r:.100} is not offered; give auto or none")
        try:
            self.messages = checked_messages(messages)
            self.tools = [*tools] if tools and tool_choice != "none" else None
            self.recorded = self.session.recorder.chat(self.messages, self.tools)
        except ValueError as error:
            raise invalid(self.field, str(error)) from error
        except ApiError as error:
            error.param = self.field
            raise
        self._answers = dict[int, dict[str, Any]]()

    def _answer(self, choice: Choice) -> dict[str, Any]:
        if self.tools is None:
            return {"role": "assistant", "content": choice.text}
        raw = self.codec.decode(choice.response.tokens, special=True)
        number = f"{hashed_seed(self.id, choice.index, size=3):06x}"
        message = answer(choice.text, raw, self._format, number, thinking=self.codec.thinking(self.recorded.tokens))
        if not self._several_calls:
            del message.get("tool_calls", [])[1:]
        return message

    @cached_property
    def _format(self) -> str:
        return format_of(self.codec.template)


class ItemDialect(ChatDialect):
    """A chat with one answer, a list of items: its text, and an item for each call of a tool."""

    def items(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """Yield the items of a complete choice."""
        message = self.message(choice)
        calls = message.get("tool_calls") or ()
        if message["content"] or not calls:
            yield self._text_item(choice, message["content"], 0)
        yield from map(self._call_item, calls)

    def grow(self, choice: Choice, text: str, begin: int) -> list[dict[str, Any]]:
        """See `Dialect`. With tools all items come at the end of the answer, which shows what they are."""
        events, at_end = list[dict[str, Any]](), self.tools is not None
        if not at_end:
            part = self._text_item(choice, text, begin)
            events += self._opened(0, part) if begin == 0 else []
            events += [self._filled(0, part)] if text else []
        for number, item in enumerate(self.items(choice) if choice.finish is not None else ()):
            events += [*self._opened(number, item), self._filled(number, item)] if at_end else []
            events += self._closed(number, item)
        return events

    @abstractmethod
    def _text_item(self, choice: Choice, text: str, begin: int) -> dict[str, Any]:
        """Return the item of a text, which begins with this token of the choice."""

    @abstractmethod
    def _call_item(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the item of a call."""

    @abstractmethod
    def _opened(self, number: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events that begin an item, whose contents `_filled` has."""

    @abstractmethod
    def _filled(self, number: int, item: dict[str, Any]) -> dict[str, Any]:
        """Return the event of contents that come to an item."""

    @abstractmethod
    def _closed(self, number: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events that end an item."""


class Chat(Completions, ChatDialect):
    """`/v1/chat/completions`."""

    kind = "chatcmpl"

    def _read(self, values: Any) -> None:
        body = read(ChatBody, values)
        self._take(body)
        self.object = "chat.completion.chunk" if self.stream else "chat.completion"
        self.limit, self.wants_log_probs = body.max_completion_tokens or body.max_tokens, bool(body.logprobs)
        for tool in body.tools or ():
            if tool.get("type", "function") != "function" or name_of(tool.get("function")) is None:
                raise unsupported(
                    "tools", f"the tool {tool!r:.100} is no function with a name; only functions are offered"
                )
        messages = [(f"messages[{number}]", message) for number, message in enumerate(body.messages)]
        self._take_chat(messages, body.tools, body.tool_choice, body.parallel_tool_calls)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return self._entry(choice, 0) | {"message": {**self.message(choice), "refusal": None}}

    def _part(self, choice: Choice, text: str, begin: int) -> dict[str, Any]:
        """With tools a choice is one part: only its end shows which calls it has."""
        delta: dict[str, Any] = {"content": text} if text else {}
        if self.tools is not None:
            message = {} if choice.finish is None else self.message(choice)
            calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls") or ())]
            delta = {"content": message["content"]} if message.get("content") else {}
            delta |= {"tool_calls": calls} if calls else {}
        if begin == 0:
            delta = {"role": "assistant", "content": "", **delta}
        return self._entry(choice, begin) | {"delta": delta}
