"""`PrefixAffinity`: which of several engines has the keys and values of a sequence that goes on."""

from __future__ import annotations

from collections.abc import Sequence

from parallel_models.generation.prefix_table import PrefixTable


class PrefixAffinity:
    """The whole sequences that engines, or data-parallel ranks, have drawn: prompts with their responses.

    A request whose prompt begins with such a sequence is a later turn or part of it, and goes to the engine that has
    its keys and values. Prompts that only begin alike, as with a common system prompt, are divided evenly.
    """

    def __init__(self) -> None:
        self._engines = PrefixTable[int]()

    def remember(self, tokens: Sequence[int], engine: int) -> None:
        """Remember that an engine has drawn a sequence."""
        self._engines[tokens] = engine

    def forget(self) -> None:
        """Forget all sequences: no engine has keys and values."""
        self._engines.clear()

    def engine(self, tokens: Sequence[int]) -> int | None:
        """Return the engine that has drawn the longest first part of a prompt; None: none has."""
        return self._engines.longest(tokens)

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
