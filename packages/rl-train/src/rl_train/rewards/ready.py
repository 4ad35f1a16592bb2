"""Ready rewards: 1 for a correct response, else 0, with the answer read from the response.

The row of the prompt holds the correct answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|[-+]?\.\d+")


def exact_match(prompt: Any, response: Any, row: Mapping[str, Any]) -> tuple[float, str]:
    """Compare the response with `row["answer"]`, both without white space around them."""
    answer = _text(response).strip()
    return float(answer == str(_entry(row, "answer")).strip()), answer


def number_match(prompt: Any, response: Any, row: Mapping[str, Any]) -> tuple[float, str | None]:
    """Compare the last number of the response with `row["answer"]`, within `row["tolerance"]` (default: 1e-6).

    The tolerance is relative for answers above 1, and absolute below. Commas between digits are left out.
    """
    found = _NUMBER.findall(_text(response))
    right, tolerance = _number(_entry(row, "answer")), float(row.get("tolerance", 1e-6))
    if not found:
        return 0.0, None
    answer = _number(found[-1])
    return float(math.isclose(answer, right, rel_tol=tolerance, abs_tol=tolerance)), f"{answer:.12g}"


def regex(prompt: Any, response: Any, row: Mapping[str, Any]) -> tuple[float, str | None]:
    """Search the response for the regular expression `row["pattern"]`; the answer is its last group, or all of it."""
    found = re.search(str(_entry(row, "pattern")), _text(response))
    return (0.0, None) if found is None else (1.0, found[found.lastindex or 0])


def environment(prompt: Any, response: Any, row: Mapping[str, Any]) -> float:
    """Return the sum of the rewards that the environment of `--environment module:class` gave."""
    return float(response.environment_reward)


# The module and the function of each name of `--reward`.
READY = {
    "exact-match": f"{__name__}:exact_match",
    "number-match": f"{__name__}:number_match",
    "regex": f"{__name__}:regex",
    "environment": f"{__name__}:environment",
    "reasoning-gym": "rl_train.environments.reasoning_gym:score",
}


def _entry(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"the row has no {name!r}; its entries are {', '.join(map(repr, row))}")
    return row[name]


def _text(response: Any) -> str:
    if not isinstance(response, str):
        raise ValueError("ready rewards read text, and the checkpoint has no tokenizer.json")
    return response


def _number(value: Any) -> float:
    return float(str(value).replace(",", ""))
