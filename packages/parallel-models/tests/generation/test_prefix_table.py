"""`PrefixTable` against a search through all sequences, with blocks of 2 tokens."""

from __future__ import annotations

from itertools import product

import pytest

from parallel_models.generation import prefix_table
from parallel_models.generation.prefix_table import PrefixTable

# They end before, at and behind the end of a block.
SEQUENCES = [tokens for length in range(6) for tokens in product((0, 1), repeat=length)]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_table, "_BLOCK", 2)


@pytest.mark.parametrize("kept", SEQUENCES, ids=str)
def test_a_sequence_is_found_by_what_begins_with_it(kept: tuple[int, ...]) -> None:
    table = PrefixTable[str]()
    table[kept] = "found"
    for tokens in SEQUENCES:
        assert (table.longest(tokens) == "found") == (tokens[: len(kept)] == kept)


def test_the_longest_of_many_sequences_is_found() -> None:
    table = PrefixTable[int]()
    for number, sequence in enumerate(SEQUENCES):
        table[sequence] = number
    for number, sequence in reversed([*enumerate(SEQUENCES)]):
        assert table.longest([*sequence, 2, 2, 2]) == number
        if sequence:
            del table[sequence]
            assert table.longest(sequence) == SEQUENCES.index(sequence[:-1])
    table.clear()
    assert table.longest(()) is None
