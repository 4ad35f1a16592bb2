"""`PrefixAffinity` against a search of all sequences."""

from __future__ import annotations

from hypothesis import given, strategies as st

from parallel_models.generation import PrefixAffinity

Sequences = st.lists(st.tuples(st.integers(0, 3), st.lists(st.sampled_from([1, 2]), max_size=4)), max_size=8)


def blocks(ends: list[int]) -> list[int]:
    """A sequence of one block of equal tokens for each number, and a block that is not full."""
    return [token for end in ends[:-1] for token in [end] * 64] + ends[-1:] * 30


@given(Sequences, Sequences)
def test_a_request_finds_the_longest_sequence_that_it_goes_on_with(
    drawn: list[tuple[int, list[int]]], asked: list[tuple[int, list[int]]]
) -> None:
    affinity, sequences = PrefixAffinity(), dict[tuple[int, ...], int]()
    for engine, ends in drawn:
        affinity.remember(blocks(ends), engine)
        sequences[tuple(blocks(ends))] = engine
    for _, ends in asked:
        prompt = (*blocks(ends), 7)
        begun = [row for row in sequences if prompt[: len(row)] == row]
        assert affinity.engine(prompt) == (sequences[max(begun, key=len)] if begun else None)
    affinity.forget()
    assert affinity.engine(blocks([1, 1, 1])) is None


def test_new_prompts_are_divided_evenly_beside_those_that_go_on() -> None:
    affinity, system = PrefixAffinity(), [5] * 200
    assert affinity.divide([[*system, 1], [*system, 2]], [201, 201], 2) is None, "a common beginning is no sequence"
    affinity.remember([*system, 1, 8], 1)
    affinity.remember([*system, 2, 9], 1)
    prompts = [[*system, 3], [*system, 1, 8, 4], [*system, 6], [*system, 2, 9, 4], [*system, 7]]
    assert affinity.divide(prompts, [201, 300, 201, 300, 201], 2) == [[0, 2, 4], [1, 3]]
