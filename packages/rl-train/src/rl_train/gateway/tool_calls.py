"""Calls of tools in drawn text, as messages of OpenAI's protocol."""

from __future__ import annotations

import json
from typing import Any

from rl_train.environments.tools import FORMATS, calls_in

# Marks of a chat template, and the format of calls that they belong to (`FORMATS`); without any, hermes.
_MARKS = {"[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama", '"parameters": dictionary': "llama"}


def format_of(template: str) -> str:
    """Return the format in which models with this chat template write calls, a key of `FORMATS`."""
    return next((name for mark, name in _MARKS.items() if mark in template), "hermes")


def answer(text: str, raw: str, form: str, number: str, *, thinking: bool) -> dict[str, Any]:
    """Return the message of a response to a client that has offered tools.

    A response with a call that cannot be read has no calls: the client gets its text.

    Args:
        text: The text without special tokens.
        raw: The text with special tokens.
        form: A key of `FORMATS`.
        number: The beginning of the ids of the calls: six letters and digits, since Mistral's templates require nine.
        thinking: Whether the text begins within the model's thoughts.
    """
    calls = calls_in(raw, form, thinking=thinking)
    if not calls or any(call.error for call in calls):
        return {"role": "assistant", "content": text}
    begin = next(match.start() for match in FORMATS[form].begin.finditer(raw) if not match.groupdict().get("thought"))
    tool_calls = [
        {
            "id": f"{number}{place:03d}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for place, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": raw[:begin].strip() or None, "tool_calls": tool_calls}
