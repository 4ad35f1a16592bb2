"""Both caches: what is kept, forgotten, dropped and shared, against a plain list of keys and values."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_layers.attention import packed_attention
from parallel_layers.inference import KVCache, PagedKVCache, SequenceCache

LAYERS, ROOM, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 9, 2, 8, 4
NewCache = Callable[..., SequenceCache]
CACHES = [
    pytest.param(KVCache, id="contiguous"),
    pytest.param(partial(PagedKVCache, block_size=2), id="paged"),
]


class Copies(TorchDispatchMode):
    """How many numbers the largest floating tensor has that is cast."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point():
            self.largest = max(self.largest, args[0].numel())
        return func(*args, **kwargs or {})


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def bring(cache: SequenceCache, lengths: list[int], padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """One forward of random tokens through every layer: its q, its k and v (one tensor), its outputs."""
    total = sum(lengths) + padding
    q = torch.randn(LAYERS, total, 2 * KV_HEADS, HEAD_DIM)
    k = torch.randn(LAYERS, total, KV_HEADS, HEAD_DIM)
    v = torch.randn(LAYERS, total, KV_HEADS, VALUE_DIM) if not cache.values_in_keys else k[..., :VALUE_DIM]
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
        assert not out[:, start:].any()


class AnyUse(RuleBasedStateMachine):
    """Forwards, samples of one prompt, stopped sequences: in any order, on any pool."""

    @initialize(
        paged=st.sampled_from([True, True, False]),
        block_size=st.integers(1, 4),
        spare=st.integers(0, 6),
        gathered=st.integers(1, 20),
        in_keys=st.booleans(),
    )
    def start(self, paged: bool, block_size: int, spare: int, gathered: int, in_keys: bool) -> None:
        sizes = (LAYERS, 2, ROOM, KV_HEADS, HEAD_DIM)
        values: dict[str, Any] = {"value_dim": VALUE_DIM, "values_in_keys": in_keys}
        self.cache: SequenceCache = KVCache(*sizes, **values)
        if paged:
            self.cache = PagedKVCache(
                *sizes, **values, block_size=block_size, num_blocks=4 + spare, max_gathered=gathered
            )
        self.model = PlainModel(2)
        self.model.check(*bring(self.cache, [3, 1]), [3, 1])

    @rule(data=st.data(), padding=st.integers(0, 3))
    def forward(self, data: st.DataObject, padding: int) -> None:
        lengths = [
            data.draw(st.integers(0, min(4, ROOM - sequence.shape[1])), label=f"new tokens of {n}")
            for n, sequence in enumerate(self.model.sequences)
        ]
        self.bring(lengths, padding)

    @rule(data=st.data())
    def samples(self, data: st.DataObject) -> None:
        """Keep some sequences, each once or several times, and go on by a token where there is room."""
        numbers = st.integers(0, len(self.model.sequences) - 1)
        kept = data.draw(st.lists(numbers, min_size=1, max_size=4), label="kept")
        self.cache.select(kept)
        self.model.sequences = [self.model.sequences[n] for n in kept]
        self.bring([int(sequence.shape[1] < ROOM) for sequence in self.model.sequences], 0)

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.model.sequences) - 1), label="stopped")
        self.cache.free([n])
        self.model.sequences[n] = self.model.sequences[n][:, :0]

    def bring(self, lengths: list[int], padding: int) -> None:
        if sum(lengths) + padding == 0:
            return
        if (
            isinstance(self.cache, PagedKVCache)
            and self.blocks_needed(self.cache, lengths) > self.cache.blocks.num_free
        ):
            with pytest.raises(ValueError, match="more blocks"):
                bring(self.cache, lengths, padding)
        else:
            self.model.check(*bring(self.cache, lengths, padding), lengths)

    def blocks_needed(self, cache: PagedKVCache, lengths: list[int]) -> int:
        """By writing the tokens one after another: a block that somebody else has, too, is replaced."""
        size, tables = cache.block_size, [list(table) for table in cache.blocks.tables]
        needed = 0
        for n, new in enumerate(lengths):
            start = self.model.sequences[n].shape[1]
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
        lengths = [sequence.shape[1] for sequence in self.model.sequences]
        assert self.cache.lengths.tolist() == lengths
        assert self.cache.num_sequences == len(lengths)
        if isinstance(self.cache, PagedKVCache):
            blocks = self.cache.blocks
            owned = {block for table in blocks.tables for block in table}
            assert len(owned) + blocks.num_free == blocks.num_blocks
            assert [len(table) for table in blocks.tables] == [-(-n // blocks.block_size) for n in lengths]


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=30, stateful_step_count=10, deadline=None)


@pytest.mark.parametrize("new_cache", CACHES)
def test_padding_is_ignored(new_cache: NewCache) -> None:
    """The cache keeps and reads nothing of a trailing padding segment of any length."""
    cache = new_cache(1, 2, 4, 1, 8)
    q, k, v = torch.randn(3, 9, 1, 8)
    cu_seqlens = bounds([2, 1, 6])
    k[3:], v[3:] = float("nan"), float("nan")
    out = cache.layer(0).attend(q, k, v, cu_seqlens, 6)
    cache.advance(cu_seqlens)
    assert cache.lengths.tolist() == [2, 1]
    assert out.isfinite().all()
    assert not out[3:].any()
    torch.testing.assert_close(out[2], v[2])
    after = cache.layer(0).attend(q[:1], q[:1], q[:1], bounds([0, 1]), 1)
    assert after.isfinite().all()


@pytest.mark.parametrize("new_cache", CACHES)
def test_reset_forgets(new_cache: NewCache) -> None:
    cache = new_cache(1, 1, 4, 1, 8)
    q, k, v = torch.randn(3, 4, 1, 8)
    cu_seqlens = bounds([4])
    first = cache.layer(0).attend(q, k, v, cu_seqlens, 4)
    cache.advance(cu_seqlens)
    cache.reset()
    assert cache.lengths.tolist() == [0]
    assert torch.equal(cache.layer(0).attend(q, k, v, cu_seqlens, 4), first)


@pytest.mark.parametrize("new_cache", CACHES)
def test_room_is_counted_exactly(new_cache: NewCache) -> None:
    """The longest of each step need not be the same sequence; only one that truly outgrows its room is refused."""
    cache = new_cache(LAYERS, 2, 5, KV_HEADS, HEAD_DIM, value_dim=VALUE_DIM)
    bring(cache, [3, 0])
    bring(cache, [0, 4])
    bring(cache, [2, 1])
    with pytest.raises(ValueError, match=r"would have 6 tokens, but the cache has room for max_length=5"):
        bring(cache, [0, 1])


@pytest.mark.parametrize("new_cache", CACHES)
def test_mistakes_are_named(new_cache: NewCache) -> None:
    cache = new_cache(1, 2, 5, 1, 8)
    q, k, v = torch.randn(3, 3, 1, 8)
    with pytest.raises(ValueError, match=r"cu_seqlens has 1 segments for a cache of 2 sequences"):
        cache.layer(0).attend(q, k, v, bounds([3]), 3)
    with pytest.raises(ValueError, match=rf"a {type(cache).__name__} is for inference"):
        cache.layer(0).attend(q.requires_grad_(), k, v, bounds([3, 0]), 3)
    for method in (cache.select, cache.free):
        with pytest.raises(ValueError, match=r"there is no sequence 2 in a cache of 2, numbered from 0"):
            method([0, 2])


@pytest.mark.parametrize("new_cache", CACHES)
def test_dropping_everyone(new_cache: NewCache) -> None:
    cache = new_cache(LAYERS, 2, 5, KV_HEADS, HEAD_DIM, value_dim=VALUE_DIM)
    bring(cache, [2, 3])
    cache.select([])
    assert cache.num_sequences == 0
    assert not bring(cache, [], padding=2)[2].any()


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("new_cache", CACHES)
def test_a_cache_of_no_sequences(new_cache: NewCache, padding: int) -> None:
    cache = new_cache(LAYERS, 0, 5, KV_HEADS, HEAD_DIM, value_dim=VALUE_DIM)
    assert bring(cache, [], padding)[2].shape == (LAYERS, padding, 2 * KV_HEADS, VALUE_DIM)


@pytest.mark.parametrize("new_cache", CACHES)
def test_boundaries_in_one_buffer(new_cache: NewCache) -> None:
    """Written to after a forward that was not counted: the next has the new ones."""
    caches = [new_cache(1, 2, 8, 1, HEAD_DIM) for _ in range(2)]
    q, k, v = torch.randn(3, 4, 1, HEAD_DIM)
    buffer = bounds([2, 2])
    caches[0].layer(0).attend(q, k, v, buffer, 2)  # a draft that is dropped
    buffer.copy_(bounds([1, 1]))
    outs = [
        cache.layer(0).attend(q[1:3], k[1:3], v[1:3], cu_seqlens, 1)
        for cache, cu_seqlens in zip(caches, (buffer, bounds([1, 1])), strict=True)
    ]
    assert torch.equal(*outs)
    caches[0].advance(buffer)
    assert caches[0].lengths.tolist() == [1, 1]


def test_samples_share_the_prompt() -> None:
    """Four samples of a prompt of 5 take its two full blocks once, and a copy each of the block that is not full."""
    cache = PagedKVCache(LAYERS, 1, 9, KV_HEADS, HEAD_DIM, value_dim=VALUE_DIM, block_size=2, num_blocks=7)
    bring(cache, [5])
    assert cache.blocks.num_free == 4
    cache.select([0, 0, 0, 0])
    assert cache.blocks.num_free == 4
    bring(cache, [1, 1, 1, 1])
    assert cache.blocks.num_free == 1
    assert {tuple(table[:2]) for table in cache.blocks.tables} == {tuple(cache.blocks.tables[0][:2])}
    assert len({table[2] for table in cache.blocks.tables}) == 4
    cache.select([2])
    assert cache.blocks.num_free == 4
    cache.free([0])
    assert cache.blocks.num_free == 7


def test_an_exhausted_pool_is_named_and_nothing_is_lost() -> None:
    cache = PagedKVCache(LAYERS, 2, 8, KV_HEADS, HEAD_DIM, value_dim=VALUE_DIM, block_size=2, num_blocks=3)
    model = PlainModel(2)
    model.check(*bring(cache, [4, 1]), [4, 1])
    with pytest.raises(
        ValueError,
        match=r"3 new tokens of 2 sequences need 2 more blocks of 2 tokens, but 0 of num_blocks=3 are free; "
        r"free\(\) or select\(\) away sequences that have stopped, or build the cache with num_blocks=5",
    ):
        bring(cache, [1, 2])
    model.check(*bring(cache, [0, 1]), [0, 1])
    cache.free([0])
    model.sequences[0] = model.sequences[0][:, :0]
    model.check(*bring(cache, [2, 2]), [2, 2])


def test_a_forward_that_broke_off_is_begun_again() -> None:
    """The blocks that it took are there for the next; samples that are made in between share none that are written."""
    cache = PagedKVCache(LAYERS, 1, 8, KV_HEADS, HEAD_DIM, value_dim=VALUE_DIM, block_size=2, num_blocks=6)
    model = PlainModel(1)
    model.check(*bring(cache, [3]), [3])
    q, k = torch.randn(3, 2, HEAD_DIM), torch.randn(3, KV_HEADS, HEAD_DIM)
    cache.layer(0).attend(q.repeat(1, 2, 1), k, k[..., :VALUE_DIM], bounds([3]), 3)
    cache.select([0, 0])
    model.sequences *= 2
    model.check(*bring(cache, [3, 2]), [3, 2])


@pytest.mark.parametrize("sizes", [{"block_size": 0}, {"num_blocks": 0}])
def test_no_blocks_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="both are at least 1"):
        PagedKVCache(1, 1, 4, 1, 8, **sizes)


@pytest.mark.parametrize("given", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [KVCache, partial(PagedKVCache, block_size=4)], ids=["contiguous", "paged"])
def test_a_cache_has_the_dtype_of_its_keys_and_is_never_cast(kind: Any, given: torch.dtype | None) -> None:
    """A model in bf16; a cache of another dtype casts the queries, which are few, instead of itself."""
    cache = kind(1, 2, 64, KV_HEADS, HEAD_DIM, dtype=given)
    assert cache.dtype == given
    for lengths in ([9, 5], [1, 1]):
        new = torch.randn(sum(lengths), KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        with Copies() as copies, torch.inference_mode(lengths == [9, 5]):
            out = cache.layer(0).attend(new, new, new, bounds(lengths), max(lengths), backend="sdpa")
            cache.advance(bounds(lengths))
        assert copies.largest <= new.numel()
        assert out.dtype == torch.bfloat16
    assert cache.dtype == cache.keys[0].dtype == (given or torch.bfloat16)
