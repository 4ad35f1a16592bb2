"""Rewards in their three forms: one response, one response with `async`, and all responses of a step."""

import asyncio
import itertools
from typing import Any

from rl_train.rewards import Response


def alphabet(prompt: str, response: Response, row: dict[str, Any]) -> float:
    """Return the share of letters that follow their predecessor in the alphabet."""
    pairs = list(itertools.pairwise(prompt[-1:] + response))
    return sum(ord(b) == ord(a) + 1 for a, b in pairs) / max(len(pairs), 1)


async def judged(prompt: str, response: Response, row: dict[str, Any]) -> float:
    """Ask a judge; the calls of all responses wait at the same time."""
    await asyncio.sleep(0.01)  # in its place: await client.post(...)
    return float(response.finish_reason == "stop")


def novel(prompts: list[str], responses: list[Response], rows: list[dict[str, Any]]) -> list[float]:
    """Return 1 for each response that no other response of the step equals."""
    return [float(responses.count(response) == 1) for response in responses]
