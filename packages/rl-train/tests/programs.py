"""Agents of the tests, as users have them: programs that call a base URL."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit


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


def wander(base_url: str, row: Mapping[str, Any]) -> float:
    """Ask some times, and return the number of letters of the answers; fail, leave calls and rewrite the history.

    The file `ends` gets a line for the end of each request; an episode of the row `hangs` does not end by itself.
    """
    draws, letters = random.Random(row["seed"]), 0
    messages: list[Any] = [{"role": "user", "content": f"question {row['seed']}"}]
    for _ in range(draws.randrange(1, 5)):
        event = draws.random()
        if event < 0.03:
            raise KeyError("gone")
        if event < 0.12:
            leave(base_url, messages, stream=event < 0.09)
        if event > 0.9:
            messages = messages[-1:]
        with request_end(row["ends"]):
            answer = ask(base_url, messages)
        letters += len(answer["content"])
        messages += [answer, {"role": "user", "content": "and?"}]
    if row["hangs"]:
        time.sleep(600)
    return float(letters)


@contextmanager
def request_end(file: str) -> Iterator[None]:
    """Add a line to a file: "answer", the name of an error, or "none" for a request that got neither in its time."""
    end = "answer"
    try:
        yield
    except BaseException as error:
        end = "none" if isinstance(getattr(error, "reason", error), TimeoutError) else repr(error)
        raise
    finally:
        with open(file, "a") as ends:
            ends.write(end + "\n")


def leave(base_url: str, messages: Sequence[Any], *, stream: bool) -> None:
    """Close the connection soon after a request."""
    url, body = urlsplit(base_url), json.dumps({"model": "policy", "messages": messages, "stream": stream}).encode()
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((str(url.hostname), int(url.port or 0)), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.005)


async def gather(base_url: str, row: Mapping[str, Any]) -> float:
    """Ask twice at the same time."""
    calls = [asyncio.to_thread(ask, base_url, [{"role": "user", "content": text}]) for text in ("a", "b")]
    return float(len(await asyncio.gather(*calls)))


def content(base_url: str, row: Mapping[str, Any]) -> float:
    """Ask once, and be content with an error."""
    with suppress(OSError):
        ask(base_url, [{"role": "user", "content": "a"}])
    return 1.0


def wrong(base_url: str) -> None:
    """Take no row."""


if __name__ == "__main__":  # as --agent-command
    given = json.loads(sys.stdin.readline())
    if given.get("does") == "status":
        sys.exit("no such tool")
    url = os.environ["OPENAI_BASE_URL"]
    post(f"{url}/reward", {"reward": talk(url, given)}, os.environ["OPENAI_API_KEY"])
