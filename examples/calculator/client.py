"""An agent as users have it: OpenAI's client, a tool and a loop. Nothing in it knows of training."""

import json
from collections.abc import Mapping
from typing import Any

from openai import OpenAI

NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": PARAMETERS}}


def multiply(arguments: str) -> str:
    """Return the product of the arguments of a call, or what is wrong with them."""
    try:
        values = json.loads(arguments)
        return str(int(values["a"]) * int(values["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def solve(base_url: str, row: Mapping[str, Any]) -> float:
    """Answer the question of a row; return 1 for the right answer, else 0."""
    client = OpenAI(base_url=base_url, api_key="in the URL")
    messages: list[Any] = [{"role": "user", "content": row["messages"]}]
    for _ in range(3):
        tools: Any = [TOOL]
        message = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(message.content == row["answer"])
        for call in message.tool_calls:
            result = multiply(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
