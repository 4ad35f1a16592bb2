"""Calls of tools in the text of a response: the formats of models, and their parsing."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

# Calls within the model's thoughts do not count.
_THOUGHT = r"(?:<think>.*?(?:</think>|\Z)|\[THINK\].*?(?:\[/THINK\]|\Z))"
_THOUGHT_ENDS = re.compile(r"</think>|\[/THINK\]")


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a family of models writes calls.

    Attributes:
        begin: The text before the JSON of a call: an object with the name and the arguments, or a list of these. A
            group `name` makes the JSON the arguments alone. A group `thought` is skipped.
        end: The text that must follow the JSON.
        arguments: The key of the arguments.
    """

    begin: re.Pattern[str]
    end: re.Pattern[str] = re.compile("")
    arguments: str = "arguments"


FORMATS = {
    # Hermes, Qwen, SmolLM3; a call without its end is an error that goes to the model.
    "hermes": ToolFormat(
        re.compile(rf"(?P<thought>{_THOUGHT})|<tool_call>\s*", re.DOTALL),
        re.compile(r"\s*(?:</tool_call>|\Z)"),
    ),
    # The whole response is one call, or several with ";" between them.
    "llama": ToolFormat(
        re.compile(rf"\A\s*(?:{_THOUGHT}\s*)?(?:<\|python_tag\|>)?\s*(?=\{{)", re.DOTALL), arguments="parameters"
    ),
    # A list of calls; since 2025 a name and arguments for each call.
    "mistral": ToolFormat(
        re.compile(
            rf"(?P<thought>{_THOUGHT})|\[TOOL_CALLS\]\s*"
            r"(?:(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?)?",
            re.DOTALL,
        )
    ),
}


def _number(text: str) -> float:
    """Return a number of JSON; ValueError for NaN, Infinity and numbers beyond those of Python."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return number


_JSON = json.JSONDecoder(parse_constant=_number, parse_float=_number)
_MORE = re.compile(r"\s*;\s*(?=\{)")


@dataclass(frozen=True)
class Call:
    """A call of a tool; `error` describes why the text of a call cannot be read."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def calls_in(text: str, name: str, *, thinking: bool = False) -> list[Call]:
    """Return the calls in the raw text of a response, in their order; `name` is a key of `FORMATS`.

    `thinking`: the text begins within the model's thoughts, as a template may begin an answer.
    """
    if thinking:
        end = _THOUGHT_ENDS.search(text)
        text = "" if end is None else text[end.end() :]
    form, calls, place = FORMATS[name], list[Call](), 0
    while match := form.begin.search(text, place):
        place, groups = match.end(), match.groupdict()
        if groups.get("thought"):
            continue
        try:
            values, place = _values(text, place)
            if not form.end.match(text, place):
                raise ValueError(f"there is more after it, {text[place : place + 20]!r}")
        except (ValueError, RecursionError) as error:
            calls.append(Call(error=f"the call is not valid JSON: {error}"))
            continue
        if groups.get("name"):
            values = [{"name": groups["name"], form.arguments: value} for value in values]
        calls.extend(_call(value, form.arguments) for value in values)
    return calls


def _values(text: str, place: int) -> tuple[list[Any], int]:
    """Return the JSON values that begin at a place, the entries of a list one by one, and the place behind them."""
    values: list[Any] = []
    while True:
        value, length = _JSON.raw_decode(text[place:])
        values.extend(value if isinstance(value, list) else [value])
        place += length
        more = _MORE.match(text, place)
        if more is None:
            return values, place
        place = more.end()


def _call(value: Any, key: str) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(error=f'a call must be an object {{"name": ..., "{key}": {{...}}}}')
    # The name is rendered with the result, and templates take no halves of surrogate pairs.
    name, arguments = value["name"].encode(errors="replace").decode(), value.get(key, {})
    if isinstance(arguments, str):
        try:
            arguments = _JSON.decode(arguments)
        except (ValueError, RecursionError) as error:
            return Call(name, error=f'"{key}" is a text that is not valid JSON: {error}')
    if not isinstance(arguments, dict):
        return Call(name, error=f'"{key}" must be an object, got {type(arguments).__name__}')
    return Call(name, arguments)
