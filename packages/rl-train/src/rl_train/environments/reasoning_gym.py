"""Tasks of reasoning-gym: generated questions and verifiers (Stojanovski et al. 2025, arXiv:2505.24760)."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

PREFIX = "reasoning_gym:"


def rows(source: str, field: str) -> Iterator[dict[str, Any]]:
    """Yield the questions of a task.

    Args:
        source: `reasoning_gym:TASK`, and options of the task with commas, such as
            `reasoning_gym:chain_sum,size=1000,max_terms=3`. Without a seed the seed is 0.
        field: The field of the question: `messages`, or `text` for a model without a chat template.

    Raises:
        ValueError: There is no such task, the task refuses an option, or reasoning-gym is not installed.
    """
    for entry in _dataset(source):
        yield {field: entry["question"], "answer": entry["answer"], "environment": source, "entry": entry}


def score(prompt: Any, response: Any, row: Mapping[str, Any]) -> tuple[float, str]:
    """Return the task's score of a response, and its answer: the text in `<answer>` tags, else the whole response."""
    from reasoning_gym.utils import extract_answer

    tagged_answer = extract_answer(response)
    answer = response.strip() if tagged_answer is None else tagged_answer
    return float(_dataset(row["environment"]).score_answer(answer, entry=row["entry"])), answer


@lru_cache
def _dataset(source: str) -> Any:
    try:
        import reasoning_gym  # an extra
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"{source} needs reasoning-gym ({error}); pip install reasoning-gym drawsvg") from None
    task, *assignments = source.removeprefix(PREFIX).split(",")
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"{source}: reasoning-gym has no task {task!r}; did you mean {near!r}?")
    options: dict[str, Any] = {"seed": 0}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        try:
            options[name.strip()] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            raise ValueError(f"{source}: {assignment!r} must be an option and a number, such as max_terms=3") from None
    try:
        return reasoning_gym.create_dataset(task, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"{source}: {error}") from None
