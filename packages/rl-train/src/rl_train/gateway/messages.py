"""Messages of OpenAI's chat completions, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_train.gateway.errors import invalid, unsupported

# The roles of clients, and those of chat templates.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# The types of parts of a content, and the field with the text.
_TEXTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}


# A message in the form of chat completions, behind its place in the client's request.
PlacedMessage = tuple[str, Mapping[str, Any]]


def checked_messages(messages: Sequence[PlacedMessage]) -> list[dict[str, Any]]:
    """Return messages with the fields that chat templates read alone, and each content as one text.

    The role "developer" becomes "system", and the result of a tool gets the name of its tool.

    Raises:
        ApiError: A message is none, or has other contents than texts; or an answer is the last message.
    """
    names: dict[Any, str] = {}
    checked = [_checked(message, place, names) for place, message in messages]
    if checked[-1]["role"] == "assistant":
        raise invalid(
            "messages", 'the last message is of the role "assistant"; the policy draws whole answers: remove it'
        )
    return checked


def _checked(message: Mapping[str, Any], place: str, names: dict[Any, str]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid("messages", f"{place}: the role {role!r:.50} must be one of {', '.join(_ROLES)}")
    if message.get("function_call") is not None:
        raise unsupported("messages", f"{place}: function_call is not offered; use tool_calls")
    calls = message.get("tool_calls") or []
    if content is None and not calls:
        raise invalid("messages", f"{place}: the content is missing; give a text")
    values = {"role": _ROLES[role], "content": _text(content, place), "name": message.get("name")}
    if calls:
        values["tool_calls"] = [_call(call, f"{place}.tool_calls", names) for call in calls]
    if role == "tool":
        if not isinstance(number := message.get("tool_call_id"), str):
            raise invalid(
                "messages",
                f"{place}: a result of a tool needs the id of its call (tool_call_id, call_id or tool_use_id)",
            )
        values |= {"tool_call_id": number, "name": values["name"] or names.get(number, "tool")}
    return {name: value for name, value in values.items() if value is not None}


def _text(content: Any, place: str) -> str:
    """Return a content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = list[str]()
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in _TEXTS:
            raise unsupported("messages", f"{place}: a content of the type {kind!r:.50} is not offered; give texts")
        if not isinstance(part.get(_TEXTS[kind]), str):
            raise invalid("messages", f"{place}: a content of the type {kind} needs the field {_TEXTS[kind]}, a text")
        texts.append(part[_TEXTS[kind]])
    return "\n".join(texts)


def _call(call: Any, place: str, names: dict[Any, str]) -> dict[str, Any]:
    """Return a call of a tool, and keep the name of the tool under the id of the call."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid("messages", f"{place}: a call needs function.name, a text")
    arguments = function.get("arguments") or "{}"
    try:
        json.loads(arguments)
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid("messages", f"{place}: the arguments {arguments!r:.100} are no JSON text ({error})") from None
    names[call.get("id")] = function["name"]
    number = {} if call.get("id") is None else {"id": call["id"]}
    return {**number, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
