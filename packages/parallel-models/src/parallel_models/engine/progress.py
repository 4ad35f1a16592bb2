"""`Progress`: a callback that reports the progress of a long call."""

from __future__ import annotations

from collections.abc import Callable

# (unit, count done, total count; 0: unknown) -> nothing. Called on the host alone.
Progress = Callable[[str, int, int], None]


def unwatched(unit: str, count: int, total: int) -> None:
    """Ignore the progress."""
