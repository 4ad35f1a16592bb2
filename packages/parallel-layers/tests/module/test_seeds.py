"""The hashes of seeds: their numbers stay over releases. The tests of each caller pin what it draws, too."""

from __future__ import annotations

import random

import pytest
import torch

from parallel_layers.module.seeds import crc_seed, hashed_seed, mixed, mixed_pairs, python_random, rank_seed


def test_the_seeds_are_those_of_earlier_releases() -> None:
    assert hashed_seed("model.norm.weight", size=4) == 3570285554
    assert hashed_seed(5, "sharded", 0, size=7) == 9666995305407405
    assert hashed_seed(5, 0, size=7, byteorder="big") == 8882083755206274
    assert crc_seed(5, 4, 2, 1) == 1494239983
    assert python_random(3, 2, 1).random() == random.Random("3/2/1").random()


@pytest.mark.parametrize(
    ("seed", "rank", "expected"),
    [
        (0, 0, 2902805962516761537),
        (0, 1, 2794019225575547101),
        (3000016, 2, 8688766403774736769),
        (-1, 3, 6020832187550906321),
    ],
)
def test_the_seeds_of_ranks_are_those_of_earlier_releases(seed: int, rank: int, expected: int) -> None:
    assert rank_seed(seed, rank) == expected


def test_mixing_is_a_bijection_of_32_bits() -> None:
    numbers = torch.arange(-(2**11), 2**11)
    assert len(mixed(numbers).unique()) == len(numbers)
    assert torch.equal(mixed(numbers + 2**32), mixed(numbers)), "higher bits do not count"
    pairs = mixed_pairs(mixed(numbers[:64]), numbers[:64])
    assert (pairs.shape, len(pairs.unique())) == ((64, 64), 64 * 64)
    assert 0 <= int(pairs.min()) <= int(pairs.max()) < 2**32
