"""`PrefixAffinity`: which of several engines has the keys and values of a sequence that goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_BLOCK = 64


class PrefixAffinity:
    """The whole sequences that engines, or data-parallel ranks, have drawn: prompts with their responses.

    A request whose prompt begins with such a sequence is a later turn or part of it, and goes to the engine that has
    its keys and values. Prompts that only begin alike, as with a common system prompt, are divided evenly. Sequences
    are found by chained hashes of their blocks (as in vLLM's prefix caching, arXiv:2309.06180).
    """

    def __init__(self) -> None:
        # By the hash of all full blocks: the tokens behind them, and the number of the engine.
        self._engines: dict[int, dict[tuple[int, ...], int]] = {}

    def remember(self, tokens: Sequence[int], engine: int) -> None:
        """Remember that an engine has drawn a sequence."""
        *_, (begin, key) = _prefixes(tokens)
        self._engines.setdefault(key, {})[tuple(tokens[begin:])] = engine

    def forget(self) -> None:
        """Forget all sequences: no engine has keys and values."""
        self._engines.clear()

    def engine(self, tokens: Sequence[int]) -> int | None:
        """Return the engine that has drawn the longest first part of a prompt; None: none has."""
        for begin, key in reversed(list(_prefixes(tokens)) if self._engines else []):
            for end, engine in sorted(self._engines.get(key, {}).items(), key=lambda item: -len(item[0])):
                if tuple(tokens[begin : begin + len(end)]) == end:
                    return engine
        return None

    def divide(self, prompts: Sequence[Sequence[int]], costs: Sequence[int], engines: int) -> list[list[int]] | None:
        """Return the numbers of the prompts of each engine, in ascending order; None: no engine has begun any of them.

        Prompts that no engine has begun go where the costs are lowest.
        """
        numbers = [self.engine(prompt) for prompt in prompts]
        if not any(number is not None for number in numbers):
            return None
        parts, loads = [list[int]() for _ in range(engines)], [0] * engines
        for place in sorted(range(len(prompts)), key=lambda place: (numbers[place] is None, -costs[place])):
            number = numbers[place]
            engine = loads.index(min(loads)) if number is None else number
            parts[engine].append(place)
            loads[engine] += costs[place]
        return [sorted(part) for part in parts]


def _prefixes(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the length and the hash of each number of full blocks at the beginning, none included."""
    key = 0
    yield 0, key
    for begin in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        key = hash((key, *tokens[begin : begin + _BLOCK]))
        yield begin + _BLOCK, key
