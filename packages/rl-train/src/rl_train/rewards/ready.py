"""Ready rewards: 1 for a correct response, else 0, with the answer read from the response.

The row of the prompt holds the correct answer. Every row is checked before a run begins.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from rl_train.rewards.numbers import boxed, equal, last_number, only_number, written


def exact_match(prompt: Any, response: Any, row: Mapping[str, Any]) -> tuple[float, str]:
    """Compare the response with `row["answer"]`, both without white space around them; 5.0 in the row is also `5`."""
    answer = _text(response).strip()
    return float(answer in _spellings(row)), answer


def number_match(prompt: Any, response: Any, row: Mapping[str, Any]) -> tuple[float, str | None]:
    r"""Compare the last number of the response, or of its last `\boxed{}`, with the number in `row["answer"]`.

    `rl_train.rewards.numbers` reads both. An integer must be equal, other numbers within 1e-6; a
    `row["tolerance"]` holds for all. It is relative for numbers above 1, and absolute below.
    """
    right, tolerance = _right_number(row)
    answer = last_number(_text(response))
    if answer is None:
        return 0.0, None
    if answer.value is None:
        return 0.0, answer.text
    return float(equal(answer.value, right, tolerance)), written(answer.value)


def math_verified(prompt: Any, response: Any, row: Mapping[str, Any]) -> tuple[float, str | None]:
    """Compare the mathematics of the response with `row["answer"]` by the package math-verify, which reads LaTeX."""
    from math_verify import verify  # an extra

    right, answer = _right_mathematics(row), _mathematics(_text(response))
    return float(verify(right, answer, timeout_seconds=_seconds())), str(answer[-1]) if answer else None


def regex(prompt: Any, response: Any, row: Mapping[str, Any]) -> tuple[float, str | None]:
    """Search the response for the regular expression `row["pattern"]`; the answer is its last group, or the match."""
    match = _pattern(row).search(_text(response))
    return (0.0, None) if match is None else (1.0, match[match.lastindex or 0])


def environment(prompt: Any, response: Any, row: Mapping[str, Any]) -> float:
    """Return the sum of the rewards that the environment of `--environment module:class` gave."""
    return float(response.environment_reward)


def _entry(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"the row has no {name!r}; its entries are {', '.join(map(repr, row))}")
    return row[name]


def _answer(row: Mapping[str, Any]) -> str | int | float | Decimal:
    value = _entry(row, "answer")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"the answer {value!r:.200} must be a text or a number")
    return value


def _text(response: Any) -> str:
    if not isinstance(response, str):
        raise ValueError("ready rewards read text, and the checkpoint has no tokenizer.json; copy that file beside it")
    return response


def _spellings(row: Mapping[str, Any]) -> set[str]:
    """Return the correct texts; a column of integers with gaps often holds floats, such as 5.0 for 5."""
    value = _answer(row)
    integer_text = {str(int(value))} if isinstance(value, float) and value.is_integer() else set()
    return {str(value).strip()} | integer_text


def _right_number(row: Mapping[str, Any]) -> tuple[Fraction, Fraction | None]:
    """Return the number of the answer, and the tolerance of the row."""
    right, tolerance = only_number(_entry(row, "answer")), row.get("tolerance")
    if tolerance is None:
        return right, None
    try:
        return right, abs(only_number(tolerance))
    except ValueError:
        raise ValueError(f"the tolerance {tolerance!r:.200} must be a number, such as 0.01") from None


def _right_mathematics(row: Mapping[str, Any]) -> list[Any]:
    r"""Return math-verify's reading of the answer, which it reads best in a `\boxed{}`."""
    text = str(_answer(row))
    right = _mathematics(text if boxed(text) is not None else rf"\boxed{{{text.rpartition('####')[2].strip()}}}")
    if not right:
        raise ValueError(f"math-verify cannot read the answer {text!r:.200}; correct it, or use exact-match")
    return right


def _mathematics(text: str) -> list[Any]:
    try:
        from math_verify import parse  # an extra
    except ImportError as error:
        raise ValueError(f"math-verify is not installed ({error}); pip install math-verify") from None
    return parse(text, parsing_timeout=_seconds())


def _seconds() -> int | None:
    """Return math-verify's time limit for one expression; its alarm works in the main thread alone."""
    return 5 if threading.current_thread() is threading.main_thread() else None


def _pattern(row: Mapping[str, Any]) -> re.Pattern[str]:
    pattern = _entry(row, "pattern")
    try:
        return re.compile(pattern)
    except (re.error, TypeError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r:.200} must be a regular expression: {error}") from None


class Ready(NamedTuple):
    """A ready reward: its `module:function`, and a function that raises ValueError for a row it cannot read."""

    function: str
    check: Callable[[Mapping[str, Any]], Any]


# The named values of `--reward`.
READY = {
    "exact-match": Ready(f"{__name__}:exact_match", _spellings),
    "number-match": Ready(f"{__name__}:number_match", _right_number),
    "math-verify": Ready(f"{__name__}:math_verified", _right_mathematics),
    "regex": Ready(f"{__name__}:regex", _pattern),
    "environment": Ready(f"{__name__}:environment", lambda row: None),
    "reasoning-gym": Ready("rl_train.environments.reasoning_gym:score", lambda row: _entry(row, "entry")),
}
