"""Calls of tools in the text of a response: the formats of models, and their parsing."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        pattern: Its first group is the JSON of a call, `{"name": ..., arguments: {...}}`, or of a list of calls.
        arguments: The key of the arguments.
    """

    pattern: re.Pattern[str]
    arguments: str = "arguments"


FORMATS = {
    # Hermes, Qwen, SmolLM3; a call without its end is an error that the model is told.
    "hermes": ToolFormat(re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)),
    "llama": ToolFormat(re.compile(r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*\})", re.DOTALL), "parameters"),
    "mistral": ToolFormat(re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)),
}


@dataclass(frozen=True)
class Call:
    """A call of a tool; `error` says what is wrong with the text of a call that cannot be read."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def calls_in(text: str, name: str) -> list[Call]:
    """Return the calls in the raw text of a response, in their order; `name` is a key of `FORMATS`."""
    found: list[Call] = []
    for match in FORMATS[name].pattern.finditer(text):
        try:
            value = json.loads(match[1])
        except (ValueError, RecursionError) as error:
            found.append(Call(error=f"the call is not valid JSON: {error}"))
            continue
        found.extend(_call(one, FORMATS[name].arguments) for one in (value if isinstance(value, list) else [value]))
    return found


def _call(value: Any, key: str) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(error=f'a call must be an object {{"name": ..., "{key}": {{...}}}}')
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        return Call(value["name"], error=f'"{key}" must be an object, got {type(arguments).__name__}')
    return Call(value["name"], arguments)
