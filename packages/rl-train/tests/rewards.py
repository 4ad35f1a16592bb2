"""Rewards of the tests, as a user would write them."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any


def alphabet(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """The share of the response that goes on with the alphabet."""
    text = prompt[-1] + response
    good = sum(ord(second) - ord(first) in (1, -25) for first, second in zip(text, response, strict=False))
    return good / max(1, len(response)) + float(row.get("bonus", 0))


def first_ids(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    return float("nan") if row.get("bad") == "nan" else float(row["bad"])


def sevens(prompt: list[int], response: list[int], row: Mapping[str, Any]) -> float:
    """The share of one token, for a checkpoint without a tokenizer."""
    return response.count(7) / len(response)


def leave(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    sys.exit(3)


def huge(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    return float(row.get("scale", 1)) * (3e38 if len(response) % 2 else -3e38)


def constant(prompt: str, response: str, row: Mapping[str, Any]) -> int:
    return 1


def as_expected(prompt: str, response: Any, row: Mapping[str, Any]) -> float:
    """Whether the reward sees what the row says."""
    seen = [prompt, str(response), response.raw, response.tokens, response.finish_reason, response.environment_reward]
    return float(seen == row["sees"])


def slow_alphabet(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    time.sleep(0.02)
    return alphabet(prompt, response, row)
