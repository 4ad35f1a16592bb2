"""States of linear attention in a cache: whatever happens to sequences, tokens get the outputs of whole sequences."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from parallel_layers.attention import CacheShape
from parallel_layers.inference import DecodeSteps, PagedKVCache
from parallel_layers.inference.states import Checkpoint, StatePool
from parallel_layers.linear_attention import (
    GatedDeltaNet,
    GatedDeltaNetConfig,
    KimiDeltaAttention,
    KimiDeltaConfig,
    Mamba2,
    Mamba2Config,
)

HIDDEN, PLACES, ROOM, WINDOW = 8, 4, 40, 4
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=3, value_head_dim=5)
KIMI, MAMBA = (
    KimiDeltaConfig(num_heads=2, head_dim=4),
    Mamba2Config(num_heads=4, head_dim=3, num_groups=2, state_size=5),
)
ONE = CacheShape(1, 8, 8)
# The entries of a cache; attention has one between the others.
SHAPES = [DELTA.state_shape(), KIMI.state_shape(), ONE, MAMBA.state_shape(), DELTA.state_shape()]


def build() -> dict[int, nn.Module]:
    torch.manual_seed(0)
    wide = {"dtype": torch.float64}
    layers: dict[int, nn.Module] = {
        0: GatedDeltaNet(HIDDEN, DELTA, **wide),
        1: KimiDeltaAttention(HIDDEN, KIMI, **wide),
        3: Mamba2(HIDDEN, MAMBA, **wide),
        4: GatedDeltaNet(HIDDEN, DELTA, **wide),
    }
    for layer in layers.values():
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
    return layers


def boundaries(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


class Sequences:
    """A cache, and beside it the tokens of each sequence and of each checkpoint."""

    def __init__(self, seed: int) -> None:
        self.random, self.layers = random.Random(seed), build()
        self.cache = PagedKVCache(SHAPES, PLACES, ROOM, block_size=4, num_blocks=99, dtype=torch.float64)
        self.cache.allocate_checkpoints(3)
        self.tokens = [torch.zeros(0, HIDDEN, dtype=torch.float64)] * PLACES
        self.kept: dict[int, tuple[Checkpoint, Tensor]] = {}

    def draw(self, count: int) -> Tensor:
        return torch.randn(count, HIDDEN, dtype=torch.float64)

    def compare(self, outputs: dict[int, Tensor], sequence: int, count: int) -> None:
        """Compare one layer's outputs of the last tokens of a sequence with those of the whole sequence."""
        whole, number = self.tokens[sequence], self.random.choice(list(self.layers))
        expected = self.layers[number](whole, boundaries([len(whole)]))[len(whole) - count :]
        torch.testing.assert_close(outputs[number], expected, rtol=1e-9, atol=1e-10)

    def places(self, *, empty: bool) -> list[int]:
        """The places with tokens, or without reserved blocks."""
        return [
            n
            for n, blocks in enumerate(self.cache.blocks.tables)
            if not (blocks if empty else len(self.tokens[n]) == 0)
        ]

    def prefill(self) -> None:
        """Bring tokens to some sequences, with padding."""
        counts = [self.random.choice([0, 0, 1, 2, 3, 7]) for _ in range(PLACES)]
        rows = [self.draw(min(count, ROOM - len(row))) for count, row in zip(counts, self.tokens, strict=True)]
        padding = [self.draw(self.random.randrange(3)) * 1e3 for _ in range(2)]
        bounds = boundaries([len(row) for row in (*rows, *padding)])
        outputs = {
            number: layer(torch.cat([*rows, *padding]), bounds, self.cache.layer(number))
            for number, layer in self.layers.items()
        }
        self.cache.advance(bounds)
        for n, row in enumerate(rows):
            self.tokens[n] = torch.cat([self.tokens[n], row])
            self.compare({i: x[bounds[n] : bounds[n + 1]] for i, x in outputs.items()}, n, len(row))

    def step(self) -> None:
        """Bring one token to each of some neighbours that go on, and nothing to those that have stopped."""
        first = self.random.randrange(PLACES)
        numbers = range(first, self.random.randint(first + 1, PLACES))
        live = torch.tensor([self.random.random() < 0.7 and len(self.tokens[n]) < ROOM for n in numbers])
        counts = [int(n in numbers and bool(live[n - first])) for n in range(PLACES)]
        self.cache.reserve(counts)
        hidden = self.draw(len(numbers)).masked_fill(~live[:, None], torch.nan)
        steps = DecodeSteps(self.cache, self.cache.lengths[numbers], first=first, live=live)
        outputs = {
            n: layer(hidden, torch.arange(len(hidden) + 1).int(), steps.layer(n)) for n, layer in self.layers.items()
        }
        self.cache.advance_by(counts)
        self.cache.lengths.copy_(torch.tensor(self.cache.blocks.lengths))
        for row, n in enumerate(numbers):
            if counts[n]:
                self.tokens[n] = torch.cat([self.tokens[n], hidden[row : row + 1]])
                self.compare({i: x[row : row + 1] for i, x in outputs.items()}, n, 1)

    def try_tokens(self) -> None:
        """Bring three tokens to all sequences, of which each takes some."""
        width = 3
        if max(map(len, self.tokens)) + width > ROOM:
            return
        counts = [self.random.randint(0, width) for _ in range(PLACES)]
        self.cache.reserve([width] * PLACES)
        hidden = self.draw(PLACES * width)
        steps = DecodeSteps(self.cache, self.cache.lengths, width)
        bounds = (width * torch.arange(PLACES + 1)).int()
        outputs = {number: layer(hidden, bounds, steps.layer(number)) for number, layer in self.layers.items()}
        steps.accept(torch.tensor(counts))
        self.cache.advance_by(counts)
        self.cache.lengths.copy_(torch.tensor(self.cache.blocks.lengths))
        for n, (count, row) in enumerate(zip(counts, hidden.split(width), strict=True)):
            before, self.tokens[n] = self.tokens[n], torch.cat([self.tokens[n], row])
            self.compare({i: x[n * width : (n + 1) * width] for i, x in outputs.items()}, n, width)
            self.tokens[n] = torch.cat([before, row[:count]])

    def share(self) -> None:
        targets = self.places(empty=True)
        if targets and self.places(empty=False):
            source = self.random.choice(self.places(empty=False))
            targets = targets[: self.random.randint(1, len(targets))]
            self.cache.share(source, targets, len(self.tokens[source]))
            for n in targets:
                self.tokens[n] = self.tokens[source]

    def move(self) -> None:
        self.free()
        sources, targets = self.places(empty=False), self.places(empty=True)
        pairs = list(zip(sources, targets, strict=False))
        self.cache.move(pairs)
        for source, target in pairs:
            self.tokens[target], self.tokens[source] = self.tokens[source], self.draw(0)
            assert not self.cache.pool.layer(0)[1][source].any()

    def free(self, place: int | None = None) -> None:
        n = self.random.randrange(PLACES) if place is None else place
        self.cache.free([n])
        self.tokens[n] = self.draw(0)

    def keep(self) -> None:
        row, n = self.random.randrange(3), self.random.randrange(PLACES)
        if row in self.kept:
            self.cache.drop(self.kept.pop(row)[0])
        self.kept[row] = self.cache.checkpoint(n, row), self.tokens[n]

    def restore(self) -> None:
        if self.kept:
            self.free(place := self.random.randrange(PLACES))
            checkpoint, self.tokens[place] = self.random.choice(list(self.kept.values()))
            self.cache.restore(place, checkpoint)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
@torch.no_grad()
def test_sequences_go_on_as_if_they_were_computed_anew(seed: int) -> None:
    sequences = Sequences(seed)
    actions: list[Callable[[], None]] = [
        sequences.prefill, sequences.step, sequences.step, sequences.try_tokens, sequences.share, sequences.move,
        sequences.free, sequences.keep, sequences.restore,
    ]  # fmt: skip
    torch.manual_seed(seed)
    for _ in range(5):
        for action in sequences.random.sample(actions, len(actions)):
            action()
    for checkpoint, _ in sequences.kept.values():
        sequences.cache.drop(checkpoint)
    sequences.cache.free(range(PLACES))
    assert sequences.cache.blocks.num_free == 99
    # Padding and places without sequences have no state.
    for number in sequences.layers:
        assert not any(states.any() for states in sequences.cache.pool.layer(number))


def test_a_state_does_not_go_back() -> None:
    cache = PagedKVCache([ONE, DELTA.state_shape()], 3, 8)
    bounds = boundaries([5, 0, 0])
    cache.reserve([5, 0, 0])
    cache.advance(bounds)
    with pytest.raises(ValueError, match="sequence 0 stand for 5 tokens and cannot go back to length=4; share a seq"):
        cache.share(0, [1], 4)
    with pytest.raises(ValueError, match="no state behind these blocks; restore a checkpoint"):
        cache.start(1, [0])
    cache.share(0, [1], 5)
    assert cache.blocks.lengths == [5, 5, 0]


@torch.no_grad()
def test_a_forward_without_tokens_leaves_the_states() -> None:
    cache = PagedKVCache(SHAPES, PLACES, ROOM, block_size=4, num_blocks=9, dtype=torch.float64)
    for pool in cache.pool._pools:
        pool.normal_()
    before = [pool.clone() for pool in cache.pool._pools]
    for number, layer in build().items():
        none = torch.zeros(0, HIDDEN, dtype=torch.float64)
        assert layer(none, boundaries([0] * PLACES), cache.layer(number)).shape == none.shape
    assert all(map(torch.equal, cache.pool._pools, before))


def test_a_checkpoint_holds_its_blocks_until_it_is_dropped() -> None:
    cache = PagedKVCache([ONE], 2, 8, block_size=4, num_blocks=5)
    cache.reserve([5, 0])
    cache.advance(boundaries([5, 0]))
    checkpoint = cache.checkpoint(0, 0)
    cache.reserve([2, 0])  # into a copy of the last block
    assert cache.blocks.tables[0][0] == checkpoint.blocks[0] != cache.blocks.tables[0][1] != checkpoint.blocks[1]
    cache.free([0])
    assert (cache.blocks.num_free, checkpoint.length) == (3, 5)
    cache.restore(1, checkpoint)
    assert (cache.blocks.tables[1], cache.blocks.lengths) == (checkpoint.blocks, [0, 5])
    cache.free([1])
    cache.drop(checkpoint)
    assert cache.blocks.num_free == 5


def test_bytes_and_dtypes_are_those_of_the_shapes() -> None:
    cache = PagedKVCache(SHAPES, 2, 8, dtype=torch.bfloat16)
    inputs, states = cache.pool.layer(0)
    assert (inputs.dtype, states.dtype) == (torch.bfloat16, torch.float32)
    assert (inputs.shape, states.shape) == ((3, WINDOW - 1, 2 * 6 + 20), (3, 4, 3, 5))
    expected = sum(2 * n * channels + 4 * v * d * e for n, channels, v, d, e in (x for x in SHAPES if x is not ONE))
    assert cache.state_bytes == expected == cache.pool.like(5).row_bytes
    assert PagedKVCache([ONE], 2, 8).state_bytes == StatePool({}, 3, torch.float32, None).row_bytes == 0


def test_training_through_a_cache_is_refused() -> None:
    cache, layer = PagedKVCache(SHAPES, 1, 8, dtype=torch.float64), build()[0]
    with pytest.raises(ValueError, match="a cache is for inference"):
        layer(torch.randn(2, HIDDEN, dtype=torch.float64), boundaries([2]), cache.layer(0))
