"""`DecodeSteps`: forwards of the same few tokens for each sequence, without the host.

Shape legend: M sequences of a step, k tokens of each, N sequences of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_layers.attention.cache import SequenceCache
from parallel_layers.attention.packed import AttentionOptions, out_with_sinks
from parallel_layers.inference.cache import Keys, PagedKVCache
from parallel_layers.inference.states import StepStates, Trial
from parallel_layers.kernels.block_attention import block_attention, supports_block_attention
from parallel_layers.kernels.paged_decode import paged_decode, supports_paged_decode


def decodes_in_blocks(cache: PagedKVCache) -> bool:
    """Return whether steps of a model with `tp_invariant` attend to the blocks themselves, without the host."""
    return all(supports_block_attention(keys, keys, cache.block_size) for keys in cache.keys.values())


class DecodeSteps(SequenceCache):
    """A cache for one forward of k tokens for each of M sequences of a `PagedKVCache`.

    The host reads nothing of the device, so a CUDA graph can capture the forward. The caller reserves blocks before
    the forwards (`PagedKVCache.reserve`) and counts the tokens that stay: after each forward on the device, in
    `PagedKVCache.lengths`, and for several forwards at once on the host (`PagedKVCache.advance_by`). A later forward
    overwrites the tokens that do not stay. Tokens without a reserved block are written to the block of padding.

    Args:
        cache: The cache.
        starts: `[M]` int32, the position in its sequence of each sequence's first token in this forward.
        tokens: k, at most the tokens of a block.
        first: The number of the first of the M sequences; the others follow.
        exact: Attend by the kernels of `packed_attention` to gathered keys, instead of by `kernels.paged_decode`.
        live: `[M]` bool, the sequences that go on; states of linear attention of the others stay. None: all go on.

    Raises:
        ValueError: k is more than the tokens of a block.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        starts: Tensor,
        tokens: int = 1,
        *,
        first: int = 0,
        exact: bool = False,
        live: Tensor | None = None,
    ) -> None:
        if tokens > cache.block_size:
            raise ValueError(f"tokens={tokens} of a sequence are more than block_size={cache.block_size}")
        self.cache, self.num_sequences, self.max_length = cache, len(starts), cache.max_length
        self.exact, self.tokens, self._numbers = exact, tokens, slice(first, first + len(starts))
        self._starts, self.table = starts, cache.table[self._numbers]
        # Of each token: the tokens before it, and the blocks of its sequence.
        self._positions, self._tables = starts, self.table
        if tokens > 1:
            ahead = torch.arange(tokens, dtype=torch.int32, device=starts.device)
            self._positions = (starts[:, None] + ahead).flatten()
            self._tables = self.table.repeat_interleave(tokens, 0)
        self._keys: Keys | None = None
        # The blocks of the tokens, and their places in these, the same in all layers.
        self._places: tuple[Tensor, Tensor] | None = None
        self._live, self._trials = live, list[Trial]()

    @property
    def lengths(self) -> Tensor:
        """See `SequenceCache`."""
        return self._starts

    def advance(self, cu_seqlens: Tensor) -> None:
        """Do nothing: the caller counts."""

    def accept(self, counts: Tensor) -> None:
        """Bring the first `counts` `[M]` of the k > 1 tokens of each sequence to its states of linear attention.

        A state cannot go back, so a forward of several tokens leaves the states as they were.
        """
        for pool, step, tokens in self._trials:
            for number, tensors in enumerate(tokens):
                step(pool, *tensors, first=self._numbers.start, live_M=counts > number)

    def states(self, layer: int, cu_seqlens: Tensor) -> StepStates:
        """See `SequenceCache`."""
        states = self.cache.pool.layer(layer)
        return StepStates(states, self._numbers.start, self.tokens, self._live, self._trials)

    def starts(self, cu_seqlens: Tensor) -> bool:
        """See `SequenceCache`."""
        return False

    def store(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor) -> None:
        """See `SequenceCache`."""
        if self._places is None:
            size = self.cache.block_size
            blocks = self._tables.gather(1, (self._positions // size).long()[:, None])[:, 0].long()
            self._places = blocks, (self._positions % size).long()
        self.cache.write(layer, k_TKD, v_TKD, *self._places)

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
        keys, values = self.cache.pools(layer)
        if options.get("backend") == "invariant" and supports_block_attention(q, keys, self.cache.block_size):
            self.store(layer, k, v, cu_seqlens)
            return self._invariant(q, keys, values, cu_seqlens, options)
        kernel = not self.exact and supports_paged_decode(q, keys)
        if not kernel or self.tokens > 1:
            self.store(layer, k, v, cu_seqlens)
        if kernel:
            # Each token attends as a sequence of its own; it writes its key once more, to the same bits.
            scale, dtype = options.get("scale"), self.cache.dtype
            return paged_decode(
                *(q, k.to(dtype), v.to(dtype), keys, values, self._tables, self._positions),
                scale=q.shape[-1] ** -0.5 if scale is None else scale,
                softcap=options.get("softcap"),
                window=options.get("window"),
                sinks=options.get("sinks"),
                scales=self.cache.scales(layer),
            )
        if self._keys is None:
            width = max(1, *(len(table) for table in self.cache.blocks.tables[self._numbers]))
            # The queries are the last keys of their sequence, also where tokens have no reserved block.
            width = min(width + (self.tokens > 1), self.table.shape[1])
            table = self.table[:, :width].long()
            room = width * self.cache.block_size
            self._keys = Keys(table, (self._starts + self.tokens).clamp(max=room), room, cu_seqlens)
        return self.cache.attend_to(layer, q, self._keys, self.tokens, options)

    def _invariant(
        self, q: Tensor, keys: Tensor, values: Tensor, cu_seqlens: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend by the kernel of `packed_attention`'s backend "triton", which reads the blocks."""
        scale, sinks = options.get("scale"), options.get("sinks")
        out, lse = block_attention(
            q, keys, values, cu_seqlens, self._starts + self.tokens, self.tokens, table_SB=self.table,
            window=options.get("window"), scale=q.shape[-1] ** -0.5 if scale is None else scale,
            softcap=options.get("softcap"),
        )  # fmt: skip
        return out if sinks is None else out_with_sinks(out, lse, sinks).to(out.dtype)
