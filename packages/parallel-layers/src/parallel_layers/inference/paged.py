"""`PagedKVCache`: a pool of blocks that sequences take as they grow (PagedAttention, https://arxiv.org/abs/2309.06180).

Shape legend: T tokens of this forward, N sequences of the cache, L most tokens of each, K key-value heads of this rank,
D head size, D' size of a value head, S segments of this forward, P blocks of the pool, b tokens of a block.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.attention.packed import AttentionOptions
from parallel_layers.inference.block_tables import BlockTables
from parallel_layers.inference.cache import Boundaries, SequenceCache
from parallel_layers.inference.paged_attention import PagedKeys, paged_attention


class _Plan(NamedTuple):
    """The places of the tokens of one forward; the same for all its layers.

    Attributes:
        made_from: The boundaries.
        new: Number of new tokens of each sequence, on the host.
        rows: `[T]`, the row of each token in the flat pool; padding goes to a block that is never read.
        keys: The places of the keys of each segment.
    """

    made_from: Boundaries
    new: list[int]
    rows: Tensor
    keys: PagedKeys


class PagedKVCache(SequenceCache):
    """Keys (after rotation) and values of N sequences in blocks of one pool; see `SequenceCache` for its use.

    It replaces a `KVCache(num_layers, N, L, num_kv_heads_local, head_dim)` and takes memory for existing tokens only: a
    sequence wastes less than one block. `free` and `select` return blocks to the pool. `select` copies nothing:
    samples of one prompt share its blocks, and a partly filled block is copied before a write.

    The host counts blocks, so it reads `cu_seqlens` once in each forward (on a GPU, a synchronisation).

    Args:
        num_layers: Number of layers.
        num_sequences: N.
        max_length: L.
        num_kv_heads: K of this rank.
        head_dim: D.
        value_dim: D'; default D.
        values_in_keys: Values are the first D' dims of the keys and are not stored (multi-head latent attention).
        block_size: b. flash-attn reads blocks of a multiple of 256 tokens in place; others are gathered for each layer.
        num_blocks: P; default: enough for N sequences of L tokens.
        max_gathered: The most keys that are gathered at a time, at least those of one sequence.
        dtype: The dtype of keys and values; default: that of the first keys.
        device: The device of keys and values.

    Raises:
        ValueError: `block_size` or `num_blocks` is below 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_sequences: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        values_in_keys: bool = False,
        *,
        block_size: int = 256,
        num_blocks: int | None = None,
        max_gathered: int = 1 << 16,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if block_size < 1 or (num_blocks is not None and num_blocks < 1):
            raise ValueError(f"block_size={block_size}, num_blocks={num_blocks}; both are at least 1")
        if num_blocks is None:
            num_blocks = max(1, num_sequences * -(-max_length // block_size))
        self.max_length, self.block_size, self.max_gathered = max_length, block_size, max_gathered
        # The last block takes the padding; it is in no sequence's table.
        self._shape = (num_layers, num_blocks + 1, block_size, num_kv_heads)
        self.head_dim, self.value_dim = head_dim, head_dim if value_dim is None else value_dim
        self.values_in_keys, self.dtype = values_in_keys, dtype
        self.keys: Tensor | None = None  # made when the first keys come, in their dtype
        self.values: Tensor | None = None
        self.lengths = torch.zeros(num_sequences, dtype=torch.int32, device=device)
        self.blocks = BlockTables(num_sequences, num_blocks, block_size)
        self._changed()

    def advance(self, cu_seqlens: Tensor) -> None:
        """Add the tokens of the finished forward to the lengths; `cu_seqlens` `[S+1]` as given to the layers."""
        self.blocks.advance(self._plan_for(cu_seqlens).new)
        self._changed()

    def select(self, sequences: Sequence[int]) -> None:
        """Keep these sequences, in this order, without copies; the others return their blocks.

        Raises:
            ValueError: There is no such sequence.
        """
        self._check_sequences(sequences)
        self.blocks.select(sequences)
        self._changed()

    def free(self, sequences: Sequence[int]) -> None:
        """Empty these sequences and return their blocks; others can start in their places.

        Raises:
            ValueError: There is no such sequence.
        """
        self._check_sequences(sequences)
        self.blocks.free(sequences)
        self._changed()

    @property
    def is_empty(self) -> bool:
        """Return whether all sequences are empty."""
        return not any(self.blocks.lengths)

    def store(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> None:
        """See `LayerCache.store`; raises ValueError also when the pool has too few blocks for the new tokens."""
        rows = self._plan_for(cu_seqlens).rows
        if self.keys is None:
            self.dtype = k_TKD.dtype if self.dtype is None else self.dtype
            self.keys = self._room(self.head_dim)
            self.values = None if self.values_in_keys else self._room(self.value_dim)
        for pool, new in ((self.keys, k_TKD), (self.values, v_TKD)):
            if pool is not None:
                pool[layer].flatten(0, 1).index_copy_(0, rows, new.to(pool.dtype))

    def attend(
        self,
        layer: int,
        q_TQD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        options: AttentionOptions,
    ) -> Tensor:
        """See `LayerCache.attend`; raises ValueError as `store` does."""
        self.store(layer, k_TKD, v_TKD, cu_seqlens, max_seqlen)
        assert self.keys is not None
        keys = self.keys[layer]
        values = keys[..., : self.value_dim] if self.values is None else self.values[layer]
        out = paged_attention(q_TQD.to(keys.dtype), keys, values, self._plan_for(cu_seqlens).keys, options)
        return out.to(q_TQD.dtype)

    def _room(self, dim: int) -> Tensor:
        with torch.inference_mode(False):  # later forwards may write outside of inference mode
            return torch.zeros(*self._shape, dim, dtype=self.dtype, device=self.lengths.device)

    def _changed(self) -> None:
        self.num_sequences = len(self.blocks.lengths)
        self.lengths = torch.tensor(self.blocks.lengths, dtype=torch.int32, device=self.lengths.device)
        self._plan: _Plan | None = None

    def _plan_for(self, cu_seqlens: Tensor) -> _Plan:
        if self._plan is not None and self._plan.made_from.are(cu_seqlens):
            return self._plan
        padding = self._check_segments(cu_seqlens)
        counts = [end - start for start, end in pairwise(cu_seqlens.tolist())]
        new, before = counts[: self.num_sequences], self.blocks.lengths
        used = [length + n for length, n in zip(before, new, strict=True)]
        if max(used, default=0) > self.max_length:
            raise self._outgrown(max(used))
        if copies := self.blocks.reserve(new):
            # Before anything is written: the last owner of a copied block may write to the block itself.
            source, copy = torch.tensor(copies, device=self.lengths.device).unbind(1)
            for pool in (self.keys, self.values):
                if pool is not None:
                    pool[:, copy] = pool[:, source]
        tables = [*self.blocks.tables, *[[]] * padding]
        width = max([1, *map(len, tables)])
        rows_of_blocks = [blocks + [0] * (width - len(blocks)) for blocks in tables]
        table = torch.tensor(rows_of_blocks, dtype=torch.int32, device=self.lengths.device).view(len(tables), width)
        keys = PagedKeys(table, self.block_size, counts, [*used, *[0] * padding], self.max_gathered)
        rows = keys.rows(slice(self.num_sequences), before, new)
        dropped = self.blocks.num_blocks * self.block_size
        rows = F.pad(rows, (0, sum(counts) - sum(new)), value=dropped)
        self._plan = _Plan(Boundaries.of(cu_seqlens), new, rows, keys)
        return self._plan
