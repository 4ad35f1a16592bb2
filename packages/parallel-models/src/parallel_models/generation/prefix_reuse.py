"""`PrefixReuse`: what new sequences take from earlier sequences that they begin with, instead of computing it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from parallel_layers.inference import Checkpoint, PagedKVCache
from parallel_models.generation.prefix_table import PrefixTable


class PrefixReuse(ABC):
    """Earlier sequences in the caches of a rank's chunks, which all have the same sequences in the same blocks.

    Attributes:
        shares_later: A sequence that has gone on can share its first tokens.
    """

    shares_later: ClassVar[bool]

    def __init__(self, caches: Sequence[PagedKVCache]) -> None:
        self.caches, self.tables = caches, caches[0].blocks

    @abstractmethod
    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return numbers that stand for the longest first part of the tokens that can be reused."""

    @abstractmethod
    def num_used(self, numbers: Sequence[int]) -> int:
        """Return how many blocks of `find` are in use and need no new memory."""

    @abstractmethod
    def start(self, slot: int, numbers: Sequence[int]) -> None:
        """Start an empty sequence with the result of `find`."""

    @abstractmethod
    def keep(self, slot: int, tokens: Sequence[int]) -> None:
        """Let later sequences find a sequence, whose first tokens are `tokens`."""

    def release(self, but: Sequence[int] = ()) -> int | None:
        """Give up what was used least recently, but not these numbers; return the blocks that became free.

        None: nothing is left that takes memory.
        """
        return None

    @abstractmethod
    def forget(self, *, for_good: bool = True) -> None:
        """Find no sequence again that is kept now: equal tokens have other keys, values and states from now on.

        `for_good` keeps no other sequence either; else the caller does not `keep` sequences that go on.
        """


class CachedBlocks(PrefixReuse):
    """Full blocks of keys and values, which count as free (`BlockTables.cached_prefix`)."""

    shares_later = True

    def find(self, tokens: Sequence[int]) -> list[int]:
        """See `PrefixReuse`: blocks."""
        return self.tables.cached_prefix(tokens)

    def num_used(self, numbers: Sequence[int]) -> int:
        """See `PrefixReuse`."""
        return self.tables.num_used(numbers)

    def start(self, slot: int, numbers: Sequence[int]) -> None:
        """See `PrefixReuse`."""
        for cache in self.caches:
            cache.start(slot, numbers)

    def keep(self, slot: int, tokens: Sequence[int]) -> None:
        """See `PrefixReuse`."""
        for cache in self.caches:
            cache.blocks.remember(slot, tokens)

    def forget(self, *, for_good: bool = True) -> None:
        """See `PrefixReuse`."""
        for cache in self.caches:
            cache.blocks.forget(for_good=for_good)


class _Kept(NamedTuple):
    """The tokens of a kept sequence, and its checkpoint in each cache."""

    tokens: list[int]
    checkpoints: list[Checkpoint]


class Checkpoints(PrefixReuse):
    """Sequences with states of linear attention, as they were when they were kept.

    A state stands for all tokens of its sequence and cannot be cut back to an earlier one. So a sequence goes on from
    the longest kept sequence that it begins with, as a whole, and computes what follows; without one it computes all of
    its tokens. Kept are every prompt without its last token, from which its further responses go on, and every sequence
    when it leaves its slot, without its last token, from which the next turn of a conversation goes on. The caches have
    room for a number of checkpoints; the one that was used least recently is dropped for a new one, and when sequences
    need the blocks of its keys and values.
    """

    shares_later = False

    def __init__(self, caches: Sequence[PagedKVCache]) -> None:
        super().__init__(caches)
        # The rows of the caches' checkpoints: free ones, and those in use, the least recently used first.
        self._free = list(range(caches[0].num_checkpoints))
        self._kept: dict[int, _Kept] = {}
        self._rows = PrefixTable[int]()
        self._keeps = True

    def find(self, tokens: Sequence[int]) -> list[int]:
        """See `PrefixReuse`: a row."""
        row = self._rows.longest(tokens)
        return [] if row is None else [row]

    def num_used(self, numbers: Sequence[int]) -> int:
        """See `PrefixReuse`; a block that is not full will be copied."""
        return sum(self._kept[row].checkpoints[0].length // self.tables.block_size for row in numbers)

    def start(self, slot: int, numbers: Sequence[int]) -> None:
        """See `PrefixReuse`."""
        for row in numbers:
            kept = self._kept[row] = self._kept.pop(row)
            for cache, checkpoint in zip(self.caches, kept.checkpoints, strict=True):
                cache.restore(slot, checkpoint)

    def keep(self, slot: int, tokens: Sequence[int]) -> None:
        """See `PrefixReuse`."""
        length = self.tables.lengths[slot]
        if not self._keeps or not 0 < length <= len(tokens) or not self.caches[0].num_checkpoints:
            return
        tokens = list(tokens[:length])
        for row in self.find(tokens):
            if len(self._kept[row].tokens) == length:
                self._kept[row] = self._kept.pop(row)
                return
        if not self._free:
            self.release()
        row = self._free.pop()
        self._kept[row] = _Kept(tokens, [cache.checkpoint(slot, row) for cache in self.caches])
        self._rows[tokens] = row

    def release(self, but: Sequence[int] = ()) -> int | None:
        """See `PrefixReuse`."""
        row, free = next((row for row in self._kept if row not in but), None), self.tables.num_free
        if row is None:
            return None
        tokens, checkpoints = self._kept.pop(row)
        for cache, checkpoint in zip(self.caches, checkpoints, strict=True):
            cache.drop(checkpoint)
        del self._rows[tokens]
        self._free.append(row)
        return self.tables.num_free - free

    def forget(self, *, for_good: bool = True) -> None:
        """See `PrefixReuse`."""
        while self.release() is not None:
            pass
        self._keeps = not for_good
