"""`Progress`: how far a long call has come, for a program that shows it."""

from __future__ import annotations

from collections.abc import Callable

# (what is counted, how many of them are done, how many there are; 0: unknown) -> nothing. Called on the host alone.
Progress = Callable[[str, int, int], None]


def unwatched(what: str, done: int, total: int) -> None:
    """Ignore the progress."""
