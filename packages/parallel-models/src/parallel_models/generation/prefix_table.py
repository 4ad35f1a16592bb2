"""`PrefixTable`: values of sequences of tokens, found by sequences that begin with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

_BLOCK = 64
_V = TypeVar("_V")


class PrefixTable(Generic[_V]):
    """A table by sequences of tokens, found by chained hashes of their blocks (as in vLLM, arXiv:2309.06180)."""

    def __init__(self) -> None:
        # By the hash of all full blocks: the tokens behind them, and the value.
        self._values: dict[int, dict[tuple[int, ...], _V]] = {}

    def __setitem__(self, tokens: Sequence[int], value: _V) -> None:
        """Set the value of a sequence."""
        *_, (begin, key) = _prefixes(tokens)
        self._values.setdefault(key, {})[tuple(tokens[begin:])] = value

    def __delitem__(self, tokens: Sequence[int]) -> None:
        """Remove a sequence."""
        *_, (begin, key) = _prefixes(tokens)
        del self._values[key][tuple(tokens[begin:])]
        if not self._values[key]:
            del self._values[key]

    def clear(self) -> None:
        """Remove all sequences."""
        self._values.clear()

    def longest(self, tokens: Sequence[int]) -> _V | None:
        """Return the value of the longest sequence that `tokens` begins with; None: there is none."""
        for begin, key in reversed(list(_prefixes(tokens)) if self._values else []):
            for end, value in sorted(self._values.get(key, {}).items(), key=lambda item: -len(item[0])):
                if tuple(tokens[begin : begin + len(end)]) == end:
                    return value
        return None


def _prefixes(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the length and the hash of each number of full blocks at the beginning, none included."""
    key = 0
    yield 0, key
    for begin in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        key = hash((key, *tokens[begin : begin + _BLOCK]))
        yield begin + _BLOCK, key
