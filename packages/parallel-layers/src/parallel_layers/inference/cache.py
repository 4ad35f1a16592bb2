"""`PagedKVCache`: keys and values in a pool of blocks (PagedAttention, https://arxiv.org/abs/2309.06180), and states.

Shape legend: T tokens of this forward, N sequences of the cache, Q query heads and K key-value heads of this rank,
D head size, D' size of a value head, S segments of this forward, P blocks of the pool, b tokens of a block, B most
blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.attention.cache import CacheShape, SequenceCache
from parallel_layers.attention.packed import AttentionOptions, packed_attention
from parallel_layers.inference.block_tables import BlockTables
from parallel_layers.inference.states import Checkpoint, PromptStates, Segments, StatePool
from parallel_layers.kernels.float8 import FLOAT8, quantize_rows
from parallel_layers.linear_attention.config import StateShape


class _Plan(NamedTuple):
    """The places of the tokens of one forward; the same for all its layers."""

    cu_seqlens: Tensor  # the boundaries that the plan is for
    new: list[int]  # new tokens of each sequence
    blocks: Tensor  # `[T]`, the block of each token; padding goes to an unused block
    offsets: Tensor  # `[T]`, the place of each token in its block
    starts: bool  # all tokens begin their sequences
    keys: Keys | None  # the keys of the segments with tokens, where some continue
    segments: Segments  # the segments with tokens


class Keys(NamedTuple):
    """The keys that segments of a forward attend to: their blocks `[S, B]`, their numbers `[S]`, and `cu_seqlens`."""

    table: Tensor
    used: Tensor
    max_used: int
    cu_seqlens: Tensor


class PagedKVCache(SequenceCache):
    """Keys (after rotation) and values of N sequences in blocks of one pool, and their states of linear attention.

    Each forward brings any number of new tokens for each sequence, packed in the order of the sequences; further
    segments are padding. Call `advance` once after the last layer. Between two forwards `share` starts a sequence with
    the first tokens of another sequence, `free` empties sequences, and `move` changes their places. A state stands for
    all tokens of a sequence, so with linear attention only whole sequences can be shared: as they are, or as they were
    when `checkpoint` copied their states.

    The host counts blocks, so it reads `cu_seqlens` once in each forward (on a GPU, a synchronisation); see
    `DecodeSteps`. Keys, values and queries are cast to the dtype of the cache.

    Args:
        shapes: The entry of a token in each layer, or the `StateShape` of a layer with linear attention;
            `CacheShape.values_in_keys` values are not stored.
        num_sequences: N.
        max_length: Maximum number of tokens in a sequence.
        block_size: b; the GPU kernel takes multiples of 64.
        num_blocks: P; default: enough for N sequences of the maximum length.
        dtype: The dtype of keys, values and the inputs of convolutions; states are fp32 (fp64 for fp64).
        device: The device of the cache.
        float8: Store keys and values in FP8, with a scale for each token and head (`kernels.float8`): half the bytes of
            bf16, and 4 bytes a scale. `dtype` is then the dtype in which queries attend to them.

    Raises:
        ValueError: `block_size` or `num_blocks` is below 1.
    """

    def __init__(
        self,
        shapes: Sequence[CacheShape | StateShape],
        num_sequences: int,
        max_length: int,
        *,
        block_size: int = 64,
        num_blocks: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        float8: bool = False,
    ) -> None:
        if block_size < 1 or (num_blocks is not None and num_blocks < 1):
            raise ValueError(f"block_size={block_size}, num_blocks={num_blocks}; both are at least 1")
        self.num_sequences, self.max_length, self.block_size = num_sequences, max_length, block_size
        self.dtype = dtype or torch.get_default_dtype()
        self.shapes = {layer: shape for layer, shape in enumerate(shapes) if isinstance(shape, CacheShape)}
        states = {layer: shape for layer, shape in enumerate(shapes) if isinstance(shape, StateShape)}
        # One more row, of zeros, is for padding.
        self.pool = StatePool(states, num_sequences + 1, self.dtype, device)
        self._checkpoints = self.pool.like(0)
        most_blocks = max(1, -(-max_length // block_size))
        self.num_blocks = max(1, num_sequences * most_blocks) if num_blocks is None else num_blocks
        self.blocks = BlockTables(num_sequences, self.num_blocks, block_size)
        with torch.inference_mode(False):  # later forwards may write outside of inference mode
            self.keys: dict[int, Tensor] = {}
            self.values: dict[int, Tensor | None] = {}
            self._scales: dict[int, tuple[Tensor, Tensor]] = {}  # of keys and values in FP8
            for layer, (heads, *sizes, in_keys) in self.shapes.items():
                # The last block takes padding and tokens of sequences that have stopped; it is in no sequence's table.
                k, v = ((self.num_blocks + 1, heads, block_size, size) for size in sizes)
                stored = FLOAT8 if float8 else dtype
                self.keys[layer] = torch.zeros(k, dtype=stored, device=device)
                self.values[layer] = None if in_keys else torch.zeros(v, dtype=stored, device=device)
                if float8:
                    of_keys = torch.zeros(k[:-1], dtype=torch.float32, device=device)
                    self._scales[layer] = of_keys, of_keys if in_keys else torch.zeros_like(of_keys)
            # A sequence that has stopped at the maximum length still has a block for its next token.
            self.table = torch.full((num_sequences, most_blocks + 1), self.num_blocks, dtype=torch.int32, device=device)
            self._lengths = torch.zeros(num_sequences, dtype=torch.int32, device=device)
        self._plan: _Plan | None = None
        # The tables and lengths on the device are older than the host's.
        self._stale = False

    @property
    def lengths(self) -> Tensor:
        """See `SequenceCache`."""
        self._bring()
        return self._lengths

    @property
    def block_bytes(self) -> int:
        """The bytes of a block, keys and values of all layers."""
        return sum(pool[0].nbytes for pool in self._pools())

    @property
    def state_bytes(self) -> int:
        """The bytes of a sequence's states of linear attention."""
        return self.pool.row_bytes

    def advance(self, cu_seqlens: Tensor) -> None:
        """See `SequenceCache`."""
        self.advance_by(self._plan_for(cu_seqlens).new)
        self._stale = True

    def advance_by(self, counts: Sequence[int]) -> None:
        """Add `counts` tokens to the host's count of each sequence; `DecodeSteps` counts on the device alone."""
        self.blocks.advance(counts)
        self._plan = None

    def reserve(self, counts: Sequence[int]) -> None:
        """Take blocks for `counts` more tokens of each sequence.

        Raises:
            ValueError: A sequence would be longer than `max_length`.
            OutOfBlocks: Too few blocks are free.
        """
        longest = max((old + n for old, n in zip(self.blocks.lengths, counts, strict=True) if n), default=0)
        if longest > self.max_length:
            raise ValueError(
                f"a sequence would have {longest} tokens, but the cache has room for max_length={self.max_length}"
            )
        if copies := self.blocks.reserve(counts):
            # Before anything is written: the last owner of a copied block may write to the block itself.
            source, copy = self._numbers(copies).long().unbind(1)
            for pool in self._pools():
                pool[copy] = pool[source]
        self._changed()
        self._bring()

    def share(self, source: int, sequences: Iterable[int], length: int) -> None:
        """Start empty sequences with the first `length` tokens of another sequence, with copies of its states alone.

        Raises:
            ValueError: There is no such sequence, the source is shorter, a sequence is not empty, or the source has
                states of linear attention, which stand for more tokens.
        """
        sequences = list(sequences)
        self._check([source])
        if length > self.blocks.lengths[source]:
            raise ValueError(f"sequence {source} has {self.blocks.lengths[source]} tokens, fewer than length={length}")
        self._check_empty(sequences)
        if self.pool.shapes and length < self.blocks.lengths[source]:
            raise ValueError(
                f"the states of sequence {source} stand for {self.blocks.lengths[source]} tokens and cannot go back to "
                f"length={length}; share a sequence before it goes on, or restore a checkpoint"
            )
        for n in sequences:
            self.blocks.share(source, n, length)
        self.pool.copy(sequences, self.pool, [source] * len(sequences))
        self._changed()

    def allocate_checkpoints(self, count: int) -> None:
        """Make room for `count` checkpoints; earlier ones are lost."""
        self._checkpoints = self.pool.like(count)

    @property
    def num_checkpoints(self) -> int:
        """The number of rows for checkpoints."""
        return self._checkpoints.num_rows

    def checkpoint(self, sequence: int, row: int) -> Checkpoint:
        """Keep the blocks of a sequence, and a copy of its states in a free row of `allocate_checkpoints`."""
        self._check([sequence])
        self._checkpoints.copy([row], self.pool, [sequence])
        return Checkpoint(row, self.blocks.hold(sequence), self.blocks.lengths[sequence])

    def restore(self, sequence: int, checkpoint: Checkpoint) -> None:
        """Start an empty sequence as a checkpoint.

        Raises:
            ValueError: There is no such sequence, or it is not empty.
        """
        self._check_empty([sequence])
        self.blocks.start(sequence, checkpoint.blocks, checkpoint.length)
        self.pool.copy([sequence], self._checkpoints, [checkpoint.row])
        self._changed()

    def drop(self, checkpoint: Checkpoint) -> None:
        """Give the blocks of a checkpoint back; its row is free."""
        self.blocks.release(checkpoint.blocks)

    def start(self, sequence: int, blocks: Sequence[int]) -> None:
        """Start an empty sequence with the tokens of blocks that `BlockTables.cached_prefix` has returned just now.

        Raises:
            ValueError: There is no such sequence, it is not empty, or there are layers with linear attention.
        """
        self._check_empty([sequence])
        if self.pool.shapes and blocks:
            raise ValueError("linear attention has no state behind these blocks; restore a checkpoint instead")
        self.blocks.start(sequence, blocks)
        self._changed()

    def move(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Move the first sequence of each pair to the place of the second; raise ValueError if that place is taken.

        The device has the new places afterwards: a CUDA graph of a step reads them there.
        """
        pairs = list(pairs)
        for source, target in pairs:
            self._check([source])
            self._check_empty([target])
            self.blocks.move(source, target)
            self.pool.copy([target], self.pool, [source])
            self.pool.clear([source])
        if pairs:
            self._changed()
            self._bring()

    def free(self, sequences: Iterable[int]) -> None:
        """Empty these sequences and return their blocks; other sequences can start in their places, with zero states.

        Raises:
            ValueError: There is no such sequence.
        """
        sequences = list(sequences)
        self._check(sequences)
        self.blocks.free(sequences)
        self.pool.clear(sequences)
        self._changed()

    def _check(self, sequences: Sequence[int]) -> None:
        for n in sequences:
            if not 0 <= n < self.num_sequences:
                raise ValueError(f"there is no sequence {n} in a cache of {self.num_sequences}, numbered from 0")

    def _check_empty(self, sequences: Sequence[int]) -> None:
        self._check(sequences)
        if occupied := [n for n in sequences if self.blocks.tables[n]]:
            raise ValueError(f"sequences {occupied} are not empty; free them first")

    def _changed(self) -> None:
        self._plan, self._stale = None, True

    def _bring(self) -> None:
        """Bring the tables and the lengths to the device."""
        if self._stale:
            width = self.table.shape[1]
            rows = [blocks + [self.num_blocks] * (width - len(blocks)) for blocks in self.blocks.tables]
            self.table.copy_(self._numbers(rows).view(self.num_sequences, width))
            self._lengths.copy_(self._numbers(self.blocks.lengths))
            self._stale = False

    def _numbers(self, numbers: Sequence[object] | Tensor) -> Tensor:
        return torch.as_tensor(numbers, dtype=torch.int32).to(self.table.device)

    def _pools(self) -> list[Tensor]:
        """Return all tensors whose first dim are the blocks; FP8 as bytes, which torch can index."""
        tensors = *self.keys.values(), *self.values.values(), *chain(*self._scales.values())
        pools = {id(pool): pool for pool in tensors if pool is not None}
        return [_indexable(pool) for pool in pools.values()]

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the scales `[P+1, K, b]` of a layer's keys and values in FP8; None: they have the cache's dtype."""
        return self._scales.get(layer)

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys `[P+1, K, b, D]` and values `[P+1, K, b, D']` of a layer."""
        keys, values = self.keys[layer], self.values[layer]
        return keys, keys[..., : self.shapes[layer].value_dim] if values is None else values

    def starts(self, cu_seqlens: Tensor) -> bool:
        """See `SequenceCache`."""
        return self._plan_for(cu_seqlens).starts

    def store(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor) -> None:
        """See `SequenceCache`."""
        plan = self._plan_for(cu_seqlens)
        self.write(layer, k_TKD, v_TKD, plan.blocks, plan.offsets)

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        """Write keys and values `[T, ...]` to places of blocks, `[T]` each."""
        for number, (pool, entries) in enumerate(((self.keys[layer], k_TKD), (self.values[layer], v_TKD))):
            if pool is None:
                continue
            if (scales := self.scales(layer)) is None:
                pool[blocks, :, offsets] = entries.to(self.dtype)
            else:
                rounded, scales[number][blocks, :, offsets] = quantize_rows(entries)
                _indexable(pool)[blocks, :, offsets] = _indexable(rounded)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        options: AttentionOptions,
    ) -> Tensor:
        """See `SequenceCache`."""
        self.store(layer, k, v, cu_seqlens)
        plan = self._plan_for(cu_seqlens)
        if plan.keys is None:
            own_q, own_k, own_v = (x.to(self.dtype) for x in (q, k, v))
            return packed_attention(own_q, own_k, own_v, cu_seqlens, max_seqlen, **options).to(q.dtype)
        return self.attend_to(layer, q, plan.keys, max_seqlen, options)

    def attend_to(self, layer: int, q: Tensor, keys: Keys, max_seqlen: int, options: AttentionOptions) -> Tensor:
        """Gather keys and values of the segments, and attend to them."""
        room = keys.table.shape[1] * self.block_size
        k, v = (self._read(layer, number, keys.table) for number in range(2))
        starts = torch.arange(0, len(keys.table) * room + 1, room, dtype=torch.int32, device=k.device)
        options = {**options, "cu_seqlens_k": starts, "max_seqlen_k": keys.max_used, "used_k": keys.used}
        out = packed_attention(q.to(self.dtype), k, v, keys.cu_seqlens, max_seqlen, **options)
        return out.to(q.dtype)

    def states(self, layer: int, cu_seqlens: Tensor) -> PromptStates:
        """See `SequenceCache`."""
        return PromptStates(self.pool.layer(layer), self._plan_for(cu_seqlens).segments)

    def _read(self, layer: int, number: int, table: Tensor) -> Tensor:
        """Return the keys (0) or values (1) of blocks `[S, B]` in the cache's dtype: `[S · B · b, K, D]`."""
        entries = self.pools(layer)[number]
        if (scales := self.scales(layer)) is not None:
            entries = _indexable(entries)[table].view(FLOAT8).to(self.dtype) * scales[number][table][..., None].to(
                self.dtype
            )
            return entries.transpose(2, 3).flatten(0, 2)
        return entries.transpose(1, 2).index_select(0, table.flatten()).flatten(0, 1)  # one copy

    def _plan_for(self, cu_seqlens: Tensor) -> _Plan:
        if self._plan is not None and self._plan.cu_seqlens is cu_seqlens:
            return self._plan
        counts = [end - start for start, end in pairwise(cu_seqlens.tolist())]
        padding = len(counts) - self.num_sequences
        if padding < 0:
            raise ValueError(
                f"cu_seqlens has {len(counts)} segments for a cache of {self.num_sequences} sequences; "
                "give a sequence without new tokens a segment of length 0"
            )
        new_tokens = counts[: self.num_sequences]
        self.reserve(new_tokens)
        starts = [*self.blocks.lengths, *[0] * padding]
        tables = [*self.blocks.tables, *[[]] * padding]
        active = [n for n, count in enumerate(counts) if count]
        width = max([1, *(len(tables[n]) for n in active)])
        table = torch.tensor([tables[n] + [self.num_blocks] * (width - len(tables[n])) for n in active])
        table = table.view(len(active), width).long()
        bounds = torch.tensor([0, *(counts[n] for n in active)]).cumsum(0)
        segment = torch.repeat_interleave(bounds.diff())
        position = (
            torch.arange(len(segment)) - bounds[segment] + torch.tensor([starts[n] for n in active]).long()[segment]
        )
        # Padding has one unused block, so its places wrap around.
        blocks = table[segment, (position // self.block_size).clamp(max=width - 1)]
        table, blocks, offsets = (self._numbers(x).long() for x in (table, blocks, position % self.block_size))
        bounds = self._numbers(bounds)
        segments = Segments.of(active, bounds, self.num_sequences)
        keys = None
        if any(starts[n] for n in active):
            used = [starts[n] + counts[n] if tables[n] else 0 for n in active]
            keys = Keys(table, self._numbers(used), max(used), bounds)
        self._plan = _Plan(cu_seqlens, new_tokens, blocks, offsets, keys is None, keys, segments)
        return self._plan


def _indexable(pool: Tensor) -> Tensor:
    """Return a tensor in FP8 as bytes: torch indexes no FP8 on every device."""
    return pool.view(torch.uint8) if pool.dtype == FLOAT8 else pool
