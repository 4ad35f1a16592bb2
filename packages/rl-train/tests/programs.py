"""Agents of the tests, as users have them: programs that call a base URL."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any


def post(url: str, body: Mapping[str, Any], key: str = "none") -> Any:
    """Return the answer to a request."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def ask(base_url: str, messages: Sequence[Any], **fields: Any) -> Any:
    """Return the message that the model answers."""
    reply = post(f"{base_url}/chat/completions", {"model": "policy", "messages": messages, **fields})
    return reply["choices"][0]["message"]


def talk(base_url: str, row: Mapping[str, Any]) -> Any:
    """Ask `turns` times, and return the number of answers; `does` says what happens in between."""
    messages: list[Any] = [{"role": "user", "content": row["messages"]}]
    for turn in range(row.get("turns", 1)):
        if turn:
            messages.append({"role": "user", "content": "ab"})
        if turn and row.get("does") == "forget":
            messages = messages[-1:]
        messages.append(ask(base_url, messages, temperature=0.3))
    match row.get("does"):
        case "raise":
            raise KeyError("gone")
        case "hang":
            time.sleep(30)
        case "exit":
            os._exit(3)
        case "nan":
            return float("nan")
        case "nothing":
            return None
        case "report":
            post(f"{base_url}/reward", {"reward": 0.25})
            return None
    return float(len(messages) // 2)


async def gather(base_url: str, row: Mapping[str, Any]) -> float:
    """Ask twice at the same time."""
    calls = [asyncio.to_thread(ask, base_url, [{"role": "user", "content": text}]) for text in ("a", "b")]
    return float(len(await asyncio.gather(*calls)))


def wrong(base_url: str) -> None:
    """Take no row."""


if __name__ == "__main__":  # as --agent-command
    given = json.loads(sys.stdin.readline())
    if given.get("does") == "status":
        sys.exit("no such tool")
    url = os.environ["OPENAI_BASE_URL"]
    post(f"{url}/reward", {"reward": talk(url, given)}, os.environ["OPENAI_API_KEY"])
