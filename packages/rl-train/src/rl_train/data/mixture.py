"""`Mixture`: the rows of several sources by weight, in an order that a seed fixes and a checkpoint continues."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from parallel_layers.module import python_random
from rl_train.environments import reasoning_gym, verifiers
from rl_train.options.fields import as_path
from rl_train.options.groups import MixtureOptions

# The number of a source, of a window of its rows, and of a row in the window.
Key = tuple[int, int, int]
# Environments that have rows, and the beginning of their options.
_ENVIRONMENTS, _OPTION = (reasoning_gym.PREFIX, verifiers.PREFIX), re.compile(r"\s*[\w.]+=")


class SourceRow(Protocol):
    """A row that knows its source."""

    @property
    def source(self) -> Path: ...  # noqa: D102


R = TypeVar("R", bound=SourceRow)
Read = TypeVar("Read", bound=SourceRow, covariant=True)


class Reader(Protocol[Read]):
    """Reads the rows of sources."""

    def rows(self, source: Path, rows: Iterable[Any] | None = None, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield the number and the fields of each row after the first `start` rows; `rows` replace the file."""

    def read(self, source: Path, number: int, row: Any) -> Read | None:
        """Return a row; None for a row that is dropped."""


def read_sources(
    reader: Reader[R], sources: Iterable[Path], rows: Iterable[Any] | None = None, window: int = 0
) -> tuple[list[R], int]:
    """Return the rows of sources that are not dropped, and the number of dropped rows.

    Args:
        reader: Reads the rows.
        sources: The files, or the names of rows of Python; see `sources_of`.
        rows: Rows of Python that replace the files, for several sources by their names.
        window: Maximum number of rows of each source; 0: all.

    Raises:
        ValueError: A row is wrong, or a source has no row that is kept.
    """
    kept, dropped = list[R](), 0
    for source in sources:
        of_source = rows.get(str(source), rows) if isinstance(rows, Mapping) else rows
        entries = [reader.read(source, *row) for row in islice(reader.rows(source, of_source), window or None)]
        kept_of_source = [row for row in entries if row is not None]
        if not entries:
            raise ValueError(f"{source} has no lines; write at least one row into it")
        if not kept_of_source:
            raise ValueError(f"{source}: all {len(entries)} rows have too many tokens; nothing is left")
        kept, dropped = kept + kept_of_source, dropped + len(entries) - len(kept_of_source)
    return kept, dropped


class Windows:
    """The rows of a source that are not all in memory: a window of `size` consecutive rows at a time."""

    def __init__(self, reader: Reader[Any], source: Path, size: int) -> None:
        self._reader, self._source, self._size = reader, source, size
        self._rows: Iterator[tuple[int, Any]] = iter(())
        self._number, self._window = -1, list[tuple[int, Any]]()

    def __call__(self, number: int) -> Sequence[tuple[int, Any]]:
        """Return the rows of a window as the reader yields them; none behind the last window."""
        if number != self._number:
            if number != self._number + 1 or number == 0:
                self._rows = self._reader.rows(self._source, start=number * self._size)
            self._number, self._window = number, list(islice(self._rows, self._size))
        return self._window


class Source(Generic[R]):
    """The rows of one source, pass after pass; each window of rows has another order in each pass.

    Args:
        window: Returns the entries of a window by its number; none behind the last one.
        read: Returns the row of an entry; None for a row that is dropped.
        seed: The seed and the number of the source.

    Attributes:
        place: The number of the pass, of the window, and of the entries of the window that are taken.
    """

    def __init__(
        self, window: Callable[[int], Sequence[Any]], read: Callable[[Any], R | None], seed: tuple[int, int]
    ) -> None:
        self._window, self._read, self._seed, self.place = window, read, seed, [0, 0, 0]

    def next(self) -> tuple[int, int, R]:
        """Return the numbers of the next row's window and of its entry there, and the row."""
        while True:
            number, window, taken = self.place
            if taken < len(entries := self._window(window)):
                self.place[2] += 1
                seed, source = self._seed
                further = (source, window) if source or window else ()
                index = _order((seed, number, *further), len(entries))[taken]
                if (row := self._read(entries[index])) is not None:
                    return window, index, row
            elif entries:
                self.place = [number, window + 1, 0]
            elif window:
                self.place = [number + 1, 0, 0]
            else:
                raise ValueError("a source has lost its rows since the run began; put them back")

    @property
    def passes(self) -> float:
        """Return the number of passes; the current one counts by its share of rows in memory that are all rows."""
        number, _, taken = self.place
        return number + (0 if isinstance(self._window, Windows) else taken / len(self._window(0)))

    def get(self, window: int, index: int) -> R:
        """Return a row that `next` has returned."""
        row = self._read(self._window(window)[index])
        assert row is not None
        return row


class Mixture(Generic[R]):
    """Rows of sources in proportion to their weights.

    After any number of rows each source has its share, up to one row for each source: the next row comes from the
    source that is furthest behind. Every rank that takes the same numbers of rows gets the same rows.

    Args:
        sources: The sources.
        weights: A positive number for each source.
    """

    def __init__(self, sources: Sequence[Source[R]], weights: Sequence[float]) -> None:
        self.sources, self._counts = sources, [0] * len(sources)
        self._shares = [weight / sum(weights) for weight in weights]

    @classmethod
    def of_rows(cls, rows: Iterable[R], seed: int, weights: Sequence[float] = ()) -> Mixture[R]:
        """Return the mixture of rows in memory; without weights each source has that of its number of rows."""
        by_source: dict[Path, list[R]] = {}
        for row in rows:
            by_source.setdefault(row.source, []).append(row)
        sources = [
            Source(lambda window, rows=rows_of_source: () if window else rows, lambda row: row, (seed, number))  # type: ignore[misc]
            for number, rows_of_source in enumerate(by_source.values())
        ]
        return cls(sources, weights or [len(rows_of_source) for rows_of_source in by_source.values()])

    @classmethod
    def of_windows(
        cls, reader: Reader[R], sources: Iterable[Path], seed: int, weights: Sequence[float], size: int
    ) -> Mixture[R]:
        """Return the mixture of sources of which `size` rows at a time are in memory."""
        return cls(
            [
                Source(Windows(reader, source, size), lambda row, file=source: reader.read(file, *row), (seed, number))  # type: ignore[misc]
                for number, source in enumerate(sources)
            ],
            weights,
        )

    def take(self, count: int, skips: Callable[[Key, Sequence[int]], bool] | None = None) -> list[tuple[Key, R]]:
        """Return the next rows with their keys, without those that `skips` leaves out by key and place."""
        taken = list[tuple[Key, R]]()
        for total in range(sum(self._counts) + 1, sum(self._counts) + 1 + count):
            behind = [share * total - done for share, done in zip(self._shares, self._counts, strict=True)]
            number = behind.index(max(behind))
            while True:
                window, index, row = self.sources[number].next()
                key = (number, window, index)
                if skips is None or not skips(key, self.sources[number].place):
                    break
            self._counts[number] += 1
            taken.append((key, row))
        return taken

    @property
    def passes(self) -> float:
        """Return the number of passes over the source that has had most of them."""
        return max(source.passes for source in self.sources)

    def get(self, key: Key) -> R:
        """Return the row of a key."""
        number, window, index = key
        return self.sources[number].get(window, index)

    @property
    def state(self) -> dict[str, Any]:
        """Return the place in each source as JSON values, for a training checkpoint."""
        return {"counts": list(self._counts), "places": [list(source.place) for source in self.sources]}

    def resume(self, state: Mapping[str, Any], taken: int) -> None:
        """Go on from a `state`, after `taken` rows; a run that began before there were several sources has none."""
        if "places" not in state:
            self.take(taken)
            return
        self._counts = list(state["counts"])
        for source, place in zip(self.sources, state["places"], strict=True):
            source.place = list(place)


@lru_cache(maxsize=8)
def _order(seed: tuple[int, ...], total: int) -> list[int]:
    return python_random(*seed).sample(range(total), total)


def split_sources(sources: Path) -> list[Path]:
    """Return the sources of a list with commas; a file of that name on this machine is one source.

    Options of an environment, `reasoning_gym:TASK,size=100`, belong to it.
    """
    if os.path.lexists(sources):
        return [sources]
    texts = list[str]()
    for text in str(sources).split(","):
        if texts and texts[-1].startswith(_ENVIRONMENTS) and _OPTION.match(text):
            texts[-1] += f",{text}"
        else:
            texts.append(text.strip())
    if len(set(texts)) < len(texts) or "" in texts:
        raise ValueError(f"{sources} must be different sources with commas, each once")
    return [as_path(text) for text in texts]


def sources_of(sources: Path, rows: Iterable[Any] | None) -> list[Path]:
    """Return the sources of an option: files, or of rows of Python their names, or one source without names."""
    paths = split_sources(sources)
    return paths if rows is None or (isinstance(rows, Mapping) and {*map(str, paths)} == {*rows}) else [sources]


def check_mixture(sources: Path, options: MixtureOptions, rows: Iterable[Any] | None) -> None:
    """Raise ValueError unless the weights and the buffer fit the sources, or `rows` of Python in their place."""
    count, weights = len(sources_of(sources, rows)), options.weight_of_sources
    if rows is not None and options.shuffle_buffer:
        raise ValueError("data.shuffle_buffer is for files, and rows of Python are in memory; leave it out")
    if weights and len(weights) != count:
        raise ValueError(f"data.weights={options.weights} has {len(weights)} weights for {count} sources: {sources}")
    if options.shuffle_buffer and count > 1 and not weights:
        raise ValueError(
            f"data.shuffle_buffer={options.shuffle_buffer} reads sources without counting their rows; give "
            f"data.weights, a number for each of the {count} sources"
        )


def mixture_of(sources: Path, options: MixtureOptions, seed: int, rows: Iterable[R], reader: Reader[R]) -> Mixture[R]:
    """Return the rows of a run in its order: `rows`, or with a shuffle buffer what the reader reads."""
    if options.shuffle_buffer:
        weights = options.weight_of_sources or (1.0,)
        return Mixture.of_windows(reader, split_sources(sources), seed, weights, options.shuffle_buffer)
    return Mixture.of_rows(rows, seed, options.weight_of_sources)


def by_source(sources: Path, rows: Sequence[SourceRow], scores: Any = None) -> dict[str, float]:
    """Return the share of each of several sources in the rows of a step, and its mean of the scores `[rows, n]`.

    The name of a source in the metrics is that of its file, where no other source has the same.
    """
    paths, stems = split_sources(sources), [path.stem for path in split_sources(sources)]
    values = dict[str, float]()
    if len(paths) > 1:
        for path in paths:
            name = path.stem if stems.count(path.stem) == 1 and "*" not in path.stem else str(path)
            numbers = [number for number, row in enumerate(rows) if row.source == path]
            values[f"source_share/{name}"] = len(numbers) / len(rows)
            if scores is not None and numbers:
                values[f"source_reward/{name}"] = float(scores[numbers].mean())
    return values
