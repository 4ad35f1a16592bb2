"""The paged cache stores, frees, shares and moves sequences as a plain list of keys and values does."""

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_layers.attention import CacheShape
from parallel_layers.attention.packed import packed_attention
from parallel_layers.inference import DecodeSteps, OutOfBlocks, PagedKVCache
from parallel_layers.kernels.float8 import FLOAT8, quantize_rows

LAYERS, PLACES, ROOM, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 4, 9, 2, 8, 4
# Keys and values of tokens of a small vocabulary, so that sequences often begin alike.
IDS = 2
SHAPE, ONE = CacheShape(KV_HEADS, HEAD_DIM, VALUE_DIM), CacheShape(1, 8, 8)


class Copies(TorchDispatchMode):
    """How many numbers the largest floating tensor has that is cast."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point():
            self.largest = max(self.largest, args[0].numel())
        return func(*args, **kwargs or {})


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def embeddings(count: int, *, in_keys: bool) -> Tensor:
    """Random keys and values of tokens, `[layers, tokens, K, D + D']`."""
    k = torch.randn(LAYERS, count, KV_HEADS, HEAD_DIM)
    return torch.cat((k, k[..., :VALUE_DIM] if in_keys else torch.randn(LAYERS, count, KV_HEADS, VALUE_DIM)), -1)


def bring(
    cache: PagedKVCache | DecodeSteps, lengths: list[int], padding: int = 0, new: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One forward through every layer: its q, its k and v (one tensor, by default random), its outputs."""
    total = sum(lengths) + padding
    if new is None:
        assert isinstance(cache, PagedKVCache)
        new = embeddings(total, in_keys=cache.shapes[0].values_in_keys)
    q = torch.randn(LAYERS, total, 2 * KV_HEADS, HEAD_DIM)
    k, v = new.split([HEAD_DIM, VALUE_DIM], -1)
    segments = [*lengths, padding] if padding else lengths
    cu_seqlens = bounds(segments)
    outs = [cache.layer(i).attend(q[i], k[i], v[i], cu_seqlens, max(segments, default=0)) for i in range(LAYERS)]
    cache.advance(cu_seqlens)
    return q, torch.cat((k, v), -1), torch.stack(outs)


class PlainModel:
    """Every sequence's keys and values as one tensor `[layers, tokens, K, D + D']`."""

    def __init__(self, num_sequences: int) -> None:
        self.sequences = [torch.zeros(LAYERS, 0, KV_HEADS, HEAD_DIM + VALUE_DIM) for _ in range(num_sequences)]

    def check(self, q: Tensor, new: Tensor, out: Tensor, lengths: list[int]) -> None:
        """Add what a forward brought, and compare its output with attention over all there is."""
        start = 0
        for n, length in enumerate(lengths):
            part = slice(start, start + length)
            self.sequences[n] = torch.cat((self.sequences[n], new[:, part]), 1)
            for i in range(LAYERS):
                k, v = self.sequences[n][i].split([HEAD_DIM, VALUE_DIM], -1)
                expected = packed_attention(
                    q[i, part], k, v, bounds([length]), length, cu_seqlens_k=bounds([len(k)]), max_seqlen_k=len(k)
                )
                torch.testing.assert_close(out[i, part], expected, rtol=1e-5, atol=1e-5)
            start += length


class AnyUse(RuleBasedStateMachine):
    """Forwards, single steps, samples of one prompt, stopped, cached and moved sequences: in any order, on any pool."""

    @initialize(block_size=st.integers(1, 4), spare=st.integers(0, 6), in_keys=st.booleans())
    def begin(self, block_size: int, spare: int, in_keys: bool) -> None:
        shapes = [SHAPE._replace(values_in_keys=in_keys)] * LAYERS
        self.cache = PagedKVCache(shapes, PLACES, ROOM, block_size=block_size, num_blocks=4 + spare)
        self.model = PlainModel(PLACES)
        self.words = embeddings(IDS, in_keys=in_keys)
        self.ids: list[list[int]] = [[] for _ in range(PLACES)]
        self.ended: list[list[int]] = []
        self.written([3, 1, 0, 0], [[0, 1, 0], [1], [], []])

    @property
    def lengths(self) -> list[int]:
        return [sequence.shape[1] for sequence in self.model.sequences]

    def written(self, lengths: list[int], ids: list[list[int]], padding: int = 0) -> None:
        """Run a forward of these tokens, and compare."""
        flat = [token for row in ids for token in row] + [0] * padding
        self.model.check(*bring(self.cache, lengths, padding, self.words[:, flat]), lengths)
        for row, more in zip(self.ids, ids, strict=True):
            row += more

    @rule(data=st.data(), padding=st.integers(0, 3))
    def forward(self, data: st.DataObject, padding: int) -> None:
        new = [data.draw(st.integers(0, min(4, ROOM - length)), label="new tokens") for length in self.lengths]
        if sum(new) + padding == 0:
            return
        if self.blocks_needed(new) > self.cache.blocks.num_free:
            with pytest.raises(OutOfBlocks, match="more blocks"):
                bring(self.cache, new, padding)
        else:
            tokens = st.integers(0, IDS - 1)
            ids = [data.draw(st.lists(tokens, min_size=n, max_size=n), label="ids") for n in new]
            self.written(new, ids, padding)

    @rule(data=st.data(), exact=st.booleans())
    def steps(self, data: st.DataObject, exact: bool) -> None:
        """A few tokens of each sequence, without the host, of which some keep the first ones; in two groups."""
        split = data.draw(st.integers(1, PLACES - 1), label="split")
        width = data.draw(st.integers(1, self.cache.block_size), label="width")
        kept = [
            data.draw(st.integers(0, width), label="kept") if length + 2 * width <= ROOM else 0
            for length in self.lengths
        ]
        # A token that does not count is written, too: its block must not be shared.
        reserved = [2 * n if n else min(1, length, ROOM - length) for n, length in zip(kept, self.lengths, strict=True)]
        if self.blocks_needed(reserved) > self.cache.blocks.num_free:
            return
        self.cache.reserve(reserved)
        for _ in range(2):
            ids = data.draw(st.lists(st.integers(0, IDS - 1), min_size=PLACES * width, max_size=PLACES * width))
            groups = list[tuple[Tensor, Tensor, Tensor]]()
            for first, end in ((0, split), (split, PLACES)):
                view = DecodeSteps(self.cache, self.cache.lengths[first:end], width, first=first, exact=exact)
                words = self.words[:, ids[first * width : end * width]]
                groups.append(bring(view, [width] * (end - first), new=words))
            q, new, out = (torch.cat(tensors, 1) for tensors in zip(*groups, strict=True))
            places = [n * width + i for n in range(PLACES) for i in range(kept[n])]
            self.model.check(q[:, places], new[:, places], out[:, places], kept)
            for n in range(PLACES):
                self.ids[n] += ids[n * width : n * width + kept[n]]
            self.cache.lengths.add_(torch.tensor(kept))
        self.cache.advance_by([2 * n for n in kept])

    @rule(data=st.data())
    def samples(self, data: st.DataObject) -> None:
        """Start empty sequences with the first tokens of another one."""
        source = data.draw(st.integers(0, PLACES - 1), label="source")
        empty = [n for n in range(PLACES) if not self.lengths[n] and n != source]
        length = data.draw(st.integers(0, self.lengths[source]), label="length")
        self.cache.share(source, empty, length)
        for n in empty:
            self.model.sequences[n] = self.model.sequences[source][:, :length]
            self.ids[n] = self.ids[source][:length]

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        source = data.draw(st.integers(0, PLACES - 1), label="source")
        for target in [n for n in range(PLACES) if not self.lengths[n] and n != source][:1]:
            self.cache.move([(source, target)])
            for state in (self.model.sequences, self.ids):
                state[source], state[target] = state[target], state[source]

    @rule(data=st.data(), remembered=st.booleans())
    def stop(self, data: st.DataObject, remembered: bool) -> None:
        n = data.draw(st.integers(0, PLACES - 1), label="stopped")
        if remembered:
            self.cache.blocks.remember(n, self.ids[n])
            self.ended.append(self.ids[n])
        self.cache.free([n])
        self.model.sequences[n], self.ids[n] = self.model.sequences[n][:, :0], []

    @rule(data=st.data(), more=st.lists(st.integers(0, IDS - 1), max_size=3))
    def begin_again(self, data: st.DataObject, more: list[int]) -> None:
        """Start an empty sequence with what is cached of a remembered sequence and further tokens."""
        for n in [n for n in range(PLACES) if not self.lengths[n]][:1]:
            ids = ([*data.draw(st.sampled_from(self.ended), label="remembered"), *more] if self.ended else more)[:ROOM]
            blocks = self.cache.blocks.cached_prefix(ids)
            self.cache.start(n, blocks)
            self.ids[n] = ids[: len(blocks) * self.cache.block_size]
            self.model.sequences[n] = self.words[:, self.ids[n]]

    def blocks_needed(self, lengths: list[int]) -> int:
        """By writing the tokens one after another: a block that another sequence has, too, is replaced."""
        size, tables = self.cache.block_size, [list(table) for table in self.cache.blocks.tables]
        needed = 0
        for n, new in enumerate(lengths):
            start = self.lengths[n]
            for i in range(start // size, -(-(start + new) // size)) if new else ():
                shared = i < len(tables[n]) and any(tables[n][i] in other for other in tables[:n] + tables[n + 1 :])
                if shared or i >= len(tables[n]):
                    needed += 1
                    tables[n][i:] = [-needed]
        return needed

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.lengths.tolist() == self.lengths
        blocks = self.cache.blocks
        owners = Counter(block for table in blocks.tables for block in table)
        assert [owners[block] for block in range(blocks.num_blocks)] == blocks._owners
        free = [*blocks._free, *blocks._unused]
        assert len(free) == len(set(free)) == blocks.num_free
        assert sorted([*owners, *free]) == list(range(blocks.num_blocks))
        for table, length in zip(blocks.tables, self.lengths, strict=True):
            assert len(table) >= -(-length // blocks.block_size)

    @invariant()
    def cached_blocks_hold_their_tokens(self) -> None:
        if not hasattr(self, "cache"):
            return
        blocks = self.cache.blocks
        assert {key: block for block, (key, _) in blocks._cached.items()} == blocks._blocks
        for block, (key, _) in blocks._cached.items():
            for layer in range(LAYERS):
                content = torch.cat([pool[block].transpose(0, 1) for pool in self.cache.pools(layer)], -1)
                assert torch.equal(content, self.words[layer, list(key[1])])


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=30 if "--slow" in sys.argv else 12, stateful_step_count=20, deadline=None)


def test_padding_is_ignored() -> None:
    """The cache keeps and reads nothing of a trailing padding segment of any length."""
    cache = PagedKVCache([ONE], 2, 4, block_size=2)
    q, k, v = torch.randn(3, 9, 1, 8)
    cu_seqlens = bounds([2, 1, 6])
    k[3:], v[3:] = float("nan"), float("nan")
    out = cache.layer(0).attend(q, k, v, cu_seqlens, 6)
    cache.advance(cu_seqlens)
    assert cache.lengths.tolist() == [2, 1]
    assert out[:3].isfinite().all()
    torch.testing.assert_close(out[2], v[2])
    after = cache.layer(0).attend(q[:1], q[:1], q[:1], bounds([0, 1]), 1)
    assert after.isfinite().all()


def test_room_is_counted_exactly() -> None:
    """The longest of each step need not be the same sequence; only one that truly outgrows its room is refused."""
    cache = PagedKVCache([SHAPE] * LAYERS, 2, 5, block_size=2)
    bring(cache, [3, 0])
    bring(cache, [0, 4])
    bring(cache, [2, 1])
    with pytest.raises(ValueError, match=r"would have 6 tokens, but the cache has room for max_length=5"):
        bring(cache, [0, 1])


def test_mistakes_are_named() -> None:
    cache = PagedKVCache([ONE], 2, 5)
    q, k, v = torch.randn(3, 3, 1, 8)
    with pytest.raises(ValueError, match=r"cu_seqlens has 1 segments for a cache of 2 sequences"):
        cache.layer(0).attend(q, k, v, bounds([3]), 3)
    with pytest.raises(ValueError, match="a cache is for inference"):
        cache.layer(0).attend(q.requires_grad_(), k, v, bounds([3, 0]), 3)
    for call in (lambda: cache.free([0, 2]), lambda: cache.share(2, [0], 1), lambda: cache.move([(0, 2)])):
        with pytest.raises(ValueError, match=r"there is no sequence 2 in a cache of 2, numbered from 0"):
            call()
    cache = PagedKVCache([SHAPE] * LAYERS, 2, 5)
    bring(cache, [2, 1])
    with pytest.raises(ValueError, match=r"sequence 1 has 1 tokens, fewer than length=2"):
        cache.share(1, [0], 2)
    for call in (lambda: cache.move([(1, 0)]), lambda: cache.start(0, [])):
        with pytest.raises(ValueError, match=r"sequences \[0\] are not empty; free them first"):
            call()


def test_a_sequence_that_moves_keeps_the_blocks_that_are_reserved_for_it() -> None:
    cache = PagedKVCache([ONE], 2, 12, block_size=4)
    free = cache.blocks.num_free
    cache.reserve([0, 9])
    taken = list(cache.blocks.tables[1])
    cache.move([(1, 0)])
    assert cache.blocks.tables == [taken, []]
    assert cache.table[0, : len(taken)].tolist() == taken  # a captured step reads it without the host
    cache.free([0])
    assert cache.blocks.num_free == free


@pytest.mark.parametrize("padding", [0, 2])
def test_a_cache_of_no_sequences(padding: int) -> None:
    cache = PagedKVCache([SHAPE] * LAYERS, 0, 5)
    assert bring(cache, [], padding)[2].shape == (LAYERS, padding, 2 * KV_HEADS, VALUE_DIM)


def test_samples_share_the_prompt() -> None:
    """Four samples of a prompt of 5 take its two full blocks once, and a copy each of the block that is not full."""
    cache = PagedKVCache([SHAPE] * LAYERS, 4, 9, block_size=2, num_blocks=7)
    bring(cache, [5, 0, 0, 0])
    assert cache.blocks.num_free == 4
    cache.share(0, [1, 2, 3], 5)
    assert cache.blocks.num_free == 4
    bring(cache, [1, 1, 1, 1])
    assert cache.blocks.num_free == 1
    assert {tuple(table[:2]) for table in cache.blocks.tables} == {tuple(cache.blocks.tables[0][:2])}
    assert len({table[2] for table in cache.blocks.tables}) == 4
    cache.free([0, 1, 3])
    assert cache.blocks.num_free == 4
    cache.free([2])
    assert cache.blocks.num_free == 7


def test_cached_blocks_are_given_up_least_recently_used_first() -> None:
    """A sequence that is used again stays; the end of a sequence goes before its beginning."""
    cache = PagedKVCache([SHAPE] * LAYERS, 2, 8, block_size=2, num_blocks=4)
    blocks = cache.blocks
    first, second = [1, 2, 3, 4, 5], [6, 7]
    for ids in (first, second):
        bring(cache, [len(ids), 0])
        blocks.remember(0, ids)
        cache.free([0])
    assert (len(blocks.cached_prefix(first)), len(blocks.cached_prefix(second)), blocks.num_free) == (2, 1, 4)
    assert len(blocks.cached_prefix([1, 2, 3, 9])) == 1
    assert blocks.cached_prefix([3, 4]) == []
    cache.start(1, blocks.cached_prefix(second))
    cache.free([1])
    bring(cache, [4, 0])
    assert (len(blocks.cached_prefix(first)), len(blocks.cached_prefix(second))) == (1, 1)
    bring(cache, [2, 0])
    assert (len(blocks.cached_prefix(first)), len(blocks.cached_prefix(second))) == (0, 1)


def test_a_cached_block_is_copied_or_leaves_the_cache_before_a_write() -> None:
    """A sample that shares a part of a full block writes into it when the sequence that filled it has ended."""
    cache = PagedKVCache([SHAPE] * LAYERS, 2, 4, block_size=4, num_blocks=2)
    bring(cache, [4, 0])
    cache.share(0, [1], 2)
    cache.blocks.remember(0, [1, 2, 3, 4])
    cache.free([0])
    assert len(cache.blocks.cached_prefix([1, 2, 3, 4])) == 1
    bring(cache, [0, 1])
    assert cache.blocks.cached_prefix([1, 2, 3, 4]) == []


def test_blocks_are_found_behind_their_own_beginning_alone() -> None:
    cache = PagedKVCache([SHAPE] * LAYERS, 2, 6, block_size=2, num_blocks=6)
    for ids in ([1, 1, 3, 3], [2, 2, 4, 4]):
        bring(cache, [4, 0])
        cache.blocks.remember(0, ids)
        cache.free([0])
    assert [len(cache.blocks.cached_prefix(ids)) for ids in ([1, 1, 3, 3], [1, 1, 4, 4], [2, 2, 3, 3])] == [2, 1, 1]


def test_a_block_is_found_again_behind_a_beginning_that_was_given_up_and_computed_anew() -> None:
    cache = PagedKVCache([SHAPE] * LAYERS, 3, 4, block_size=2, num_blocks=4)
    blocks, ids = cache.blocks, [1, 2, 3, 4]
    bring(cache, [2, 4, 0])
    cache.share(1, [2], 4)
    blocks.remember(0, ids[:2])
    blocks.remember(1, ids)  # behind the first block of the sequence 0
    cache.free([0, 1])
    bring(cache, [4, 0, 0])  # takes all free blocks
    assert blocks.cached_prefix(ids) == []
    blocks.remember(2, ids)
    assert blocks.cached_prefix(ids) == blocks.tables[2]
    assert len(blocks._blocks) == len(blocks._cached)
    cache.free([2])
    assert blocks.cached_prefix(ids) != []
    assert blocks.num_free == 2


def test_nothing_is_found_once_equal_tokens_have_other_keys() -> None:
    cache = PagedKVCache([SHAPE] * LAYERS, 2, 6, block_size=2)
    blocks, ids = cache.blocks, [1, 2, 3, 4]
    bring(cache, [2, 4])
    blocks.remember(0, ids)
    blocks.remember(1, ids)
    cache.free([0])
    blocks.forget()
    assert blocks.cached_prefix(ids) == []
    bring(cache, [4, 0])
    for n in (0, 1):
        blocks.remember(n, ids)
    cache.free([0, 1])
    assert blocks.cached_prefix(ids) == []
    assert sorted(blocks._free) == list(range(blocks.num_blocks))


def test_an_exhausted_pool_is_named_and_nothing_is_lost() -> None:
    cache = PagedKVCache([SHAPE] * LAYERS, 2, 8, block_size=2, num_blocks=3)
    model = PlainModel(2)
    model.check(*bring(cache, [4, 1]), [4, 1])
    with pytest.raises(
        OutOfBlocks,
        match=r"3 new tokens of 2 sequences need 2 more blocks of 2 tokens, but 0 of num_blocks=3 are free; "
        r"free\(\) sequences that have stopped, or build the cache with num_blocks=5",
    ):
        bring(cache, [1, 2])
    model.check(*bring(cache, [0, 1]), [0, 1])
    cache.free([0])
    model.sequences[0] = model.sequences[0][:, :0]
    model.check(*bring(cache, [2, 2]), [2, 2])


@pytest.mark.parametrize("sizes", [{"block_size": 0}, {"num_blocks": 0}])
def test_no_blocks_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="both are at least 1"):
        PagedKVCache([ONE], 1, 4, **sizes)


def test_a_cache_keeps_its_dtype() -> None:
    """Queries and new keys, which are few, are cast, and never the cache."""
    cache = PagedKVCache([SHAPE._replace(value_dim=HEAD_DIM)], 2, 64, dtype=torch.float32)
    for lengths in ([9, 5], [1, 1]):
        new = torch.randn(sum(lengths), KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        with Copies() as copies, torch.inference_mode(lengths == [9, 5]):
            out = cache.layer(0).attend(new, new, new, bounds(lengths), max(lengths), backend="sdpa")
            cache.advance(bounds(lengths))
        assert copies.largest <= new.numel()
        assert out.dtype == torch.bfloat16
    assert cache.dtype == cache.keys[0].dtype == torch.float32


@pytest.mark.parametrize("in_keys", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_float8_keeps_each_key_and_value_with_a_scale(in_keys: bool, exact: bool) -> None:
    """Tokens of this forward attend to each other as they are; later tokens attend to the rounded ones."""
    torch.manual_seed(0)
    shapes = [SHAPE._replace(values_in_keys=in_keys)] * LAYERS
    cache = PagedKVCache(shapes, PLACES, ROOM, block_size=2, dtype=torch.float32, float8=True)
    plain = PagedKVCache(shapes, PLACES, ROOM, block_size=2)
    assert (cache.dtype, cache.keys[0].dtype) == (torch.float32, FLOAT8)
    sizes = HEAD_DIM if in_keys else HEAD_DIM + VALUE_DIM
    assert cache.block_bytes == LAYERS * 2 * KV_HEADS * (sizes + 4 * (1 if in_keys else 2))
    assert plain.block_bytes == LAYERS * 2 * KV_HEADS * 4 * sizes
    model = PlainModel(PLACES)
    q, new, out = bring(cache, [3, 1, 0, 2])
    model.check(q, new, out, [3, 1, 0, 2])

    def rounded(entries: Tensor) -> Tensor:
        key, value = (
            numbers.float() * scales[..., None]
            for numbers, scales in map(quantize_rows, entries.split([HEAD_DIM, VALUE_DIM], -1))
        )
        return torch.cat((key, key[..., :VALUE_DIM] if in_keys else value), -1)

    model.sequences = [rounded(entries) for entries in model.sequences]
    cache.share(0, [2], 3)
    model.sequences[2] = model.sequences[0]
    cache.reserve([1] * PLACES)  # copies the shared block, with its scales
    steps = DecodeSteps(cache, cache.lengths, exact=exact)
    q, new, out = bring(steps, [1] * PLACES, new=embeddings(PLACES, in_keys=in_keys))
    model.check(q, rounded(new), out, [1] * PLACES)
