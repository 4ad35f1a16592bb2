"""`DecodeSteps`: forwards of one token for each sequence, without the host.

Shape legend: M sequences of a step, N of the cache.
"""

from __future__ import annotations

from torch import Tensor

from parallel_layers.attention.cache import SequenceCache
from parallel_layers.attention.packed import AttentionOptions
from parallel_layers.inference.cache import Keys, PagedKVCache
from parallel_layers.kernels.paged_decode import paged_decode, supports_paged_decode


class DecodeSteps(SequenceCache):
    """A cache for forwards of one token for each of the first M sequences of a `PagedKVCache`.

    The host reads nothing of the device, so a CUDA graph can capture a forward. The caller reserves blocks before the
    forwards (`PagedKVCache.reserve`) and counts their tokens afterwards (`PagedKVCache.advance_by`). The token of an
    inactive sequence does not count.

    Args:
        cache: The cache.
        num_sequences: M.
        active: `[N]` int32, 1 for each sequence that goes on; the caller may change the numbers between two forwards.
        exact: Attend by the kernels of `packed_attention` to gathered keys, instead of by `kernels.paged_decode`.
    """

    def __init__(self, cache: PagedKVCache, num_sequences: int, active: Tensor, *, exact: bool = False) -> None:
        self.cache, self.num_sequences, self.max_length = cache, num_sequences, cache.max_length
        self.exact, self.active = exact, active[:num_sequences]
        self._lengths, self.table = cache.lengths[:num_sequences], cache.table[:num_sequences]
        self._keys: Keys | None = None

    @property
    def lengths(self) -> Tensor:
        """See `SequenceCache`."""
        return self._lengths

    def advance(self, cu_seqlens: Tensor) -> None:
        """See `SequenceCache`."""
        self._lengths += self.active
        self._keys = None

    def starts(self, cu_seqlens: Tensor) -> bool:
        """See `SequenceCache`."""
        return False

    def store(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor) -> None:
        """See `SequenceCache`."""
        size = self.cache.block_size
        blocks = self.table.gather(1, (self.lengths // size).long()[:, None])[:, 0].long()
        self.cache.write(layer, k_TKD, v_TKD, blocks, (self.lengths % size).long())

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
        if not self.exact and supports_paged_decode(q, keys):
            scale, dtype = options.get("scale"), self.cache.dtype
            return paged_decode(
                *(q, k.to(dtype), v.to(dtype), keys, values, self.table, self.lengths),
                scale=q.shape[-1] ** -0.5 if scale is None else scale,
                softcap=options.get("softcap"),
                window=options.get("window"),
                sinks=options.get("sinks"),
                scales=self.cache.scales(layer),
            )
        self.store(layer, k, v, cu_seqlens)
        if self._keys is None:
            width = max(1, *(len(table) for table in self.cache.blocks.tables[: self.num_sequences]))
            table = self.table[:, :width].long()
            room = width * self.cache.block_size
            self._keys = Keys(table, (self.lengths + 1).clamp(max=room), room, cu_seqlens)
        return self.cache.attend_to(layer, q, self._keys, 1, options)
