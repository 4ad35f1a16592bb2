"""The blocks of a pool that each sequence has, counted on the host without tensors.

Sequences with the same first tokens may share blocks. A sequence gets a copy of a shared block before it writes to the
block (https://arxiv.org/abs/2309.06180, section 4.4). A full block whose tokens were stated can be found again by these
tokens, also when its sequences have ended, until its memory is needed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count


class OutOfBlocks(ValueError):
    """The pool has too few free blocks; nothing has changed."""


# The number of the cached block before (0: none), and the tokens of a block: equal keys mean equal sequences so far.
_Key = tuple[int, tuple[int, ...]]


class BlockTables:
    """The blocks and the lengths of N sequences, over a pool of `num_blocks` blocks of `block_size` tokens.

    Cached blocks are those that `cached_prefix` finds. Without a sequence a cached block counts as free; the block that
    was used least recently is given up first. No sequence writes to a cached block.
    """

    def __init__(self, num_sequences: int, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables: list[list[int]] = [[] for _ in range(num_sequences)]
        self.lengths = [0] * num_sequences
        self._owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        # The cached block of a key, and of a cached block the key and the number, which no other block ever has.
        self._blocks: dict[_Key, int] = {}
        self._cached: dict[int, tuple[_Key, int]] = {}
        self._numbers = count(1)
        # The cached blocks without a sequence, the least recently used first.
        self._unused: dict[int, None] = {}
        self._remembers = True

    @property
    def num_free(self) -> int:
        """Return the number of free blocks, cached blocks without a sequence included."""
        return len(self._free) + len(self._unused)

    def cached_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Return the cached blocks that hold the first tokens, as many as there are."""
        blocks, number = list[int](), 0
        for key_tokens in self._divided(tokens):
            block = self._blocks.get((number, key_tokens))
            if block is None:
                break
            blocks.append(block)
            _, number = self._cached[block]
        return blocks

    def num_used(self, blocks: Iterable[int]) -> int:
        """Return how many of the blocks are in a sequence."""
        return sum(self._owners[block] > 0 for block in blocks)

    def start(self, sequence: int, blocks: Sequence[int], length: int | None = None) -> None:
        """Give an empty sequence blocks of `hold`, or blocks that `cached_prefix` has returned just now.

        `length` are the tokens in them (default: the blocks are full).
        """
        for block in blocks:
            self._owners[block] += 1
            self._unused.pop(block, None)
        self.tables[sequence] = list(blocks)
        self.lengths[sequence] = len(blocks) * self.block_size if length is None else length

    def hold(self, sequence: int) -> list[int]:
        """Return the blocks of a sequence's tokens, which stay as they are until `release`."""
        blocks = self.tables[sequence][: -(-self.lengths[sequence] // self.block_size)]
        for block in blocks:
            self._owners[block] += 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks of `hold`; blocks without an owner become free."""
        for block in reversed(blocks):
            self._owners[block] -= 1
            if not self._owners[block] and block in self._cached:
                self._unused[block] = None
            elif not self._owners[block]:
                self._free.append(block)

    def remember(self, sequence: int, tokens: Sequence[int]) -> None:
        """Let `cached_prefix` find the full blocks of a sequence, whose first tokens are `tokens`."""
        number = 0
        written = tokens[: self.lengths[sequence] * self._remembers]
        for key_tokens, block in zip(self._divided(written), self.tables[sequence], strict=False):
            key = number, key_tokens
            if key not in self._blocks:
                self._uncache(block)
                self._blocks[key], self._cached[block] = block, (key, next(self._numbers))
            _, number = self._cached[self._blocks[key]]

    def forget(self, *, for_good: bool = True) -> None:
        """Find no block again that is cached now: equal tokens have other keys and values from now on.

        `for_good` remembers no other block either; else the caller does not `remember` sequences that go on.
        """
        self._blocks.clear()
        self._cached.clear()
        self._free += self._unused
        self._unused.clear()
        self._remembers = not for_good

    def reserve(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Give each sequence n the unshared blocks that `counts[n]` more tokens need; a second call changes nothing.

        Returns `(source, copy)` of each shared block that was replaced; copy its content before any write.

        Raises:
            OutOfBlocks: Too few blocks are free.
        """
        needed = self._needed(counts)
        if needed > self.num_free:
            enough = self.num_blocks + needed - self.num_free
            raise OutOfBlocks(
                f"{sum(counts)} new tokens of {sum(n > 0 for n in counts)} sequences need {needed} more blocks of "
                f"{self.block_size} tokens, but {self.num_free} of num_blocks={self.num_blocks} are free; free() "
                f"sequences that have stopped, or build the cache with num_blocks={enough}"
            )
        copies = []
        for n, table in enumerate(self.tables):
            for i in self._written_blocks(n, counts[n]):
                if i == len(table):
                    table.append(self._take())
                elif self._owners[source := table[i]] > 1:
                    self._owners[source] -= 1
                    table[i] = self._take()
                    copies.append((source, table[i]))
                else:
                    self._uncache(source)
        return copies

    def advance(self, counts: Sequence[int]) -> None:
        """Add `counts` tokens, for which blocks were reserved, to the lengths."""
        self.lengths = [length + n for length, n in zip(self.lengths, counts, strict=True)]

    def share(self, source: int, sequence: int, length: int) -> None:
        """Give an empty sequence the first `length` tokens of another sequence, in the same blocks."""
        blocks = self.tables[source][: -(-length // self.block_size)]
        for block in blocks:
            self._owners[block] += 1
        self.tables[sequence], self.lengths[sequence] = list(blocks), length

    def move(self, source: int, target: int) -> None:
        """Give an empty sequence all blocks of a `source`, reserved blocks included; the source becomes empty."""
        self.tables[target], self.lengths[target] = self.tables[source], self.lengths[source]
        self.tables[source], self.lengths[source] = [], 0

    def free(self, sequences: Iterable[int]) -> None:
        """Empty these sequences; blocks without another owner become free."""
        for n in sequences:
            self.release(self.tables[n])
            self.tables[n], self.lengths[n] = [], 0

    def _written_blocks(self, n: int, count: int) -> range:
        """Return the indices of the blocks that sequence n writes to."""
        size, length = self.block_size, self.lengths[n]
        return range(length // size, -(-(length + count) // size)) if count else range(0)

    def _needed(self, counts: Sequence[int]) -> int:
        appended, writers = 0, Counter[int]()
        for n, table in enumerate(self.tables):
            for i in self._written_blocks(n, counts[n]):
                if i < len(table):
                    writers[table[i]] += 1
                else:
                    appended += 1
        # The last owner of a block writes to the block itself.
        return appended + sum(min(count, self._owners[block] - 1) for block, count in writers.items())

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._unused))
            del self._unused[block]
            self._uncache(block)
        self._owners[block] = 1
        return block

    def _uncache(self, block: int) -> None:
        if block in self._cached:
            key, _ = self._cached.pop(block)
            del self._blocks[key]

    def _divided(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of each full block."""
        size = self.block_size
        for end in range(size, len(tokens) + 1, size):
            yield tuple(tokens[end - size : end])
