"""Which blocks of a pool each sequence has: counting on the host alone, no tensors.

A block may belong to several sequences, which then began with the same tokens. Nobody writes into a shared block: a
sequence that must gets a copy first (https://arxiv.org/abs/2309.06180, section 4.4).
"""

from collections import Counter
from collections.abc import Sequence


class BlockTables:
    """The tables of N sequences over a pool of blocks.

    Args:
        num_sequences: N.
        num_blocks: Blocks of the pool.
        block_size: Tokens of a block.

    Attributes:
        tables: For each sequence its blocks, in the order of its tokens.
        lengths: Its tokens, which its last blocks need not be full of.
    """

    def __init__(self, num_sequences: int, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables: list[list[int]] = [[] for _ in range(num_sequences)]
        self.lengths = [0] * num_sequences
        self._owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that no sequence has."""
        return len(self._free)

    def reserve(self, new: Sequence[int]) -> list[tuple[int, int]]:
        """Give each sequence the blocks that `new[n]` more tokens need, so that it alone writes to them.

        Calling it again for the same tokens takes nothing more.

        Returns:
            `(source, copy)` of each shared block that was replaced by a copy: its content has to be copied before
            anything is written.

        Raises:
            ValueError: Too few blocks are free. Nothing has changed then.
        """
        needed = self._needed(new)
        if needed > self.num_free:
            enough = self.num_blocks + needed - self.num_free
            raise ValueError(
                f"{sum(new)} new tokens of {sum(n > 0 for n in new)} sequences need {needed} more blocks of "
                f"{self.block_size} tokens, but {self.num_free} of num_blocks={self.num_blocks} are free; free() or "
                f"select() away sequences that have stopped, or build the cache with num_blocks={enough}"
            )
        copies = []
        for n, table in enumerate(self.tables):
            for i in self._written(n, new[n]):
                if i == len(table):
                    table.append(self._take())
                elif self._owners[source := table[i]] > 1:
                    self._owners[source] -= 1
                    table[i] = self._take()
                    copies.append((source, table[i]))
        return copies

    def advance(self, new: Sequence[int]) -> None:
        """Count the tokens that blocks were reserved for."""
        self.lengths = [length + n for length, n in zip(self.lengths, new, strict=True)]

    def select(self, sequences: Sequence[int]) -> None:
        """Keep these sequences, in this order; one that is named several times shares its blocks with itself."""
        kept = [(list(self.tables[n]), self.lengths[n]) for n in sequences]
        for table, _ in kept:
            for block in table:
                self._owners[block] += 1
        self.free(range(len(self.tables)))
        self.tables, self.lengths = [table for table, _ in kept], [length for _, length in kept]

    def free(self, sequences: Sequence[int]) -> None:
        """Take the blocks from these sequences; those that no other has can be given again."""
        for n in sequences:
            for block in reversed(self.tables[n]):
                self._owners[block] -= 1
                if not self._owners[block]:
                    self._free.append(block)
            self.tables[n], self.lengths[n] = [], 0

    def _written(self, n: int, new: int) -> range:
        """Which of its blocks sequence n writes to."""
        size, length = self.block_size, self.lengths[n]
        return range(length // size, -(-(length + new) // size)) if new else range(0)

    def _needed(self, new: Sequence[int]) -> int:
        appended, writers = 0, Counter[int]()
        for n, table in enumerate(self.tables):
            for i in self._written(n, new[n]):
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
