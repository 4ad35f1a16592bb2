"""The blocks of a pool that each sequence has, counted on the host without tensors.

Sequences with the same first tokens may share blocks. A sequence gets a copy of a shared block before it writes to the
block (https://arxiv.org/abs/2309.06180, section 4.4).
"""

from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfBlocks(ValueError):
    """The pool has too few free blocks; nothing has changed."""


class BlockTables:
    """The blocks and the lengths of N sequences, over a pool of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_sequences: int, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables: list[list[int]] = [[] for _ in range(num_sequences)]
        self.lengths = [0] * num_sequences
        self._owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Return the number of free blocks."""
        return len(self._free)

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
            for block in reversed(self.tables[n]):
                self._owners[block] -= 1
                if not self._owners[block]:
                    self._free.append(block)
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
        block = self._free.pop()
        self._owners[block] = 1
        return block
