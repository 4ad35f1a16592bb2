"""Anthropic's `/v1/messages`: blocks in place of texts, events for blocks, and Anthropic's form of errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_train.gateway.bodies import MessagesBody, read
from rl_train.gateway.chat import ItemDialect
from rl_train.gateway.drawing import Choice
from rl_train.gateway.errors import ApiError, invalid, unsupported

# The field "type" of an error with this HTTP status.
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_ERRORS |= {504: "timeout_error"}
_STOP_REASONS: dict[str | None, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


class Messages(ItemDialect):
    """`/v1/messages`."""

    kind = "msg"

    def _read(self, values: Any) -> None:
        body = read(MessagesBody, values)
        self._take(body)
        system = [] if not body.system else [("system", {"role": "system", "content": body.system})]
        messages = [
            (f"messages[{number}]", new)
            for number, message in enumerate(body.messages)
            for new in _messages(message, number)
        ]
        tools, choice = [_tool(tool) for tool in body.tools or ()], body.tool_choice or {}
        several_calls = not choice.get("disable_parallel_tool_use")
        self._take_chat([*system, *messages], tools, choice.get("type"), several_calls)

    def reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """See `Dialect`."""
        (choice,) = choices
        values = {"content": list(self.items(choice)), "usage": self._usage(choices) | _CACHE}
        return self._message() | self._end(choice) | values

    def begin(self) -> list[dict[str, Any]]:
        """See `Dialect`."""
        return [{"type": "message_start", "message": self._message()}]

    def end(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """See `Dialect`."""
        (choice,) = choices
        usage = self._usage(choices) | _CACHE
        return [{"type": "message_delta", "delta": self._end(choice), "usage": usage}, {"type": "message_stop"}]

    @classmethod
    def error(cls, error: ApiError) -> dict[str, Any]:
        """See `Dialect`."""
        kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}

    def _message(self) -> dict[str, Any]:
        """Return the message before its first block."""
        values: dict[str, Any] = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return values | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage(()) | _CACHE}

    def _end(self, choice: Choice) -> dict[str, Any]:
        reason = "stop_sequence" if choice.stop is not None else _STOP_REASONS[self.finish(choice)]
        return {"stop_reason": reason, "stop_sequence": choice.stop}

    def _text_item(self, choice: Choice, text: str, begin: int) -> dict[str, Any]:
        return {"type": "text", "text": text}

    def _call_item(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        values = {"id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        return {"type": "tool_use", **values}

    def _opened(self, number: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        empty: dict[str, Any] = {"text": ""} if item["type"] == "text" else {"input": {}}
        return [{"type": "content_block_start", "index": number, "content_block": item | empty}]

    def _filled(self, number: int, item: dict[str, Any]) -> dict[str, Any]:
        delta = {"type": "text_delta", "text": item["text"]} if item["type"] == "text" else None
        delta = delta or {"type": "input_json_delta", "partial_json": json.dumps(item["input"])}
        return {"type": "content_block_delta", "index": number, "delta": delta}

    def _closed(self, number: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": number}]


class CountTokens(Messages):
    """`/v1/messages/count_tokens`: the prompt of `Messages`, of which nothing is drawn."""

    draws = False

    def _read(self, values: Any) -> None:
        super()._read({"max_tokens": 1, **values} if isinstance(values, Mapping) else values)

    def reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """See `Dialect`."""
        return {"input_tokens": len(self.recorded.tokens)}


def _messages(message: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """Return a message as messages of chat completions: each result of a tool is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise invalid("messages", f"messages[{number}]: the role {role!r:.50} must be user or assistant")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise invalid("messages", f"messages[{number}]: the content must be a text or a list of blocks")
    messages, texts, calls = list[dict[str, Any]](), list[Any](), list[dict[str, Any]]()
    for block in blocks:
        match role, block.get("type"):
            case "user", "tool_result":
                if texts:
                    raise invalid("messages", f"messages[{number}]: results of tools come before texts")
                result = {"tool_call_id": block.get("tool_use_id"), "content": block.get("content") or ""}
                messages.append({"role": "tool", **result})
            case "assistant", "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                texts.append(block)
    if texts or calls or not messages:
        messages.append({"role": role, "content": texts, **({"tool_calls": calls} if calls else {})})
    return messages


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chat completions."""
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise unsupported(
            "tools", f"the tool {tool!r:.100} has a type or no name; only tools of the client are offered"
        )
    described = {"description": tool["description"]} if tool.get("description") else {}
    function = {"name": tool["name"], **described, "parameters": tool.get("input_schema") or {}}
    return {"type": "function", "function": function}
