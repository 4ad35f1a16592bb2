"""`KVCache`: for each sequence one run of rows of the maximum length.

Shape legend: T tokens of this forward, N sequences of the cache, L room of each, K key-value heads of this rank,
D head size, D' size of a value head, S segments of this forward.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.attention.packed import AttentionOptions, packed_attention
from parallel_layers.inference.cache import Boundaries, SequenceCache


class _Plan(NamedTuple):
    """The places of the tokens of one forward; the same for all its layers.

    Attributes:
        made_from: The boundaries.
        rows: `[T]`, the row of each token in the flat cache; padding goes to the last row, which is never read.
        cu_k: `[S+1]`, the start of each segment's keys.
        used_k: `[S]`, the number of each segment's keys, with new tokens; 0 for padding.
        max_used: At least the largest of `used_k`.
    """

    made_from: Boundaries
    rows: Tensor
    cu_k: Tensor
    used_k: Tensor
    max_used: int


class KVCache(SequenceCache):
    """Keys (after rotation) and values of N sequences with room for L tokens each; see `SequenceCache` for its use.

        cache = KVCache(num_layers, N, L, num_kv_heads_local, head_dim)

    The host waits for the device only when sequences may have outgrown the room. `select` copies the kept sequences,
    one layer at a time.

    Args:
        num_layers: Number of layers.
        num_sequences: N.
        max_length: L.
        num_kv_heads: K of this rank.
        head_dim: D.
        value_dim: D'; default D.
        values_in_keys: Values are the first D' dims of the keys and are not stored (multi-head latent attention).
        dtype: The dtype of keys and values; default: that of the first keys.
        device: The device of keys and values.
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
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.num_sequences, self.max_length = num_sequences, max_length
        self.value_dim = head_dim if value_dim is None else value_dim
        self.values_in_keys, self.dtype = values_in_keys, dtype
        self._num_layers, self._heads = num_layers, (num_kv_heads, head_dim)
        self.keys: list[Tensor] = []  # allocated with the first keys, in their dtype
        self.values: list[Tensor] = []
        self.lengths = torch.zeros(num_sequences, dtype=torch.int32, device=device)
        self._longest = 0  # at least the length of the longest sequence, counted on the host
        self._plan: _Plan | None = None

    def reset(self) -> None:
        """Forget all tokens."""
        self.lengths = torch.zeros_like(self.lengths)
        self._longest, self._plan = 0, None

    def advance(self, cu_seqlens: Tensor) -> None:
        """Add the tokens of the finished forward to the lengths; `cu_seqlens` `[S+1]` as given to the layers."""
        self.lengths = self.lengths + cu_seqlens.diff()[: self.num_sequences]
        known = self._plan if self._plan is not None and self._plan.made_from.are(cu_seqlens) else None
        self._longest = self._longest_now() if known is None else known.max_used
        self._plan = None

    def select(self, sequences: Sequence[int]) -> None:
        """Keep these sequences, in this order, and free the memory of the others.

        Raises:
            ValueError: There is no such sequence.
        """
        self._check_sequences(sequences)
        kept = torch.tensor(list(sequences), dtype=torch.long, device=self.lengths.device)
        place = torch.arange(self.max_length, device=kept.device)
        unread = kept.new_full((1,), self.num_sequences * self.max_length)
        rows = torch.cat(((kept[:, None] * self.max_length + place).flatten(), unread))
        for layers in (self.keys, self.values):
            for i, layer in enumerate(layers):
                layers[i] = layer[rows]
        self.lengths, self.num_sequences = self.lengths[kept], len(kept)
        self._longest, self._plan = self._longest_now(), None

    def free(self, sequences: Sequence[int]) -> None:
        """Empty these sequences; others can start in their places.

        Raises:
            ValueError: There is no such sequence.
        """
        self._check_sequences(sequences)
        self.lengths = self.lengths.index_fill(
            0, torch.tensor(list(sequences), dtype=torch.long, device=self.lengths.device), 0
        )
        self._longest, self._plan = self._longest_now(), None

    @property
    def is_empty(self) -> bool:
        """Return whether all sequences are empty, by the host's own count."""
        return self._longest == 0

    def store(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> None:
        """See `LayerCache.store`."""
        rows = self._plan_for(cu_seqlens, max_seqlen, k_TKD.shape[0]).rows
        if not self.keys:
            self.dtype = k_TKD.dtype if self.dtype is None else self.dtype
            self.keys = self._room(self._heads[1])
            self.values = [] if self.values_in_keys else self._room(self.value_dim)
        self.keys[layer].index_copy_(0, rows, k_TKD.to(self.dtype))
        if not self.values_in_keys:
            self.values[layer].index_copy_(0, rows, v_TKD.to(self.dtype))

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
        """See `LayerCache.attend`."""
        self.store(layer, k_TKD, v_TKD, cu_seqlens, max_seqlen)
        plan = self._plan_for(cu_seqlens, max_seqlen, q_TQD.shape[0])
        keys = self.keys[layer]
        values = keys[..., : self.value_dim] if self.values_in_keys else self.values[layer]
        options = {**options, "cu_seqlens_k": plan.cu_k, "max_seqlen_k": plan.max_used, "used_k": plan.used_k}
        out = packed_attention(q_TQD.to(keys.dtype), keys[:-1], values[:-1], cu_seqlens, max_seqlen, **options)
        return out.to(q_TQD.dtype)

    def _room(self, dim: int) -> list[Tensor]:
        shape = (self.num_sequences * self.max_length + 1, self._heads[0], dim)
        with torch.inference_mode(False):  # later forwards may write outside of inference mode
            return [torch.zeros(shape, dtype=self.dtype, device=self.lengths.device) for _ in range(self._num_layers)]

    def _longest_now(self) -> int:
        return int(self.lengths.max()) if self.num_sequences else 0

    def _plan_for(self, cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> _Plan:
        if self._plan is not None and self._plan.made_from.are(cu_seqlens):
            return self._plan
        padding = self._check_segments(cu_seqlens)
        starts = torch.arange(self.num_sequences + 1, device=cu_seqlens.device, dtype=torch.int32) * self.max_length
        used = self.lengths + cu_seqlens.diff()[: self.num_sequences]
        longest = self._longest + max_seqlen
        if longest > self.max_length:  # an upper bound: another sequence may grow more than the longest
            longest = int(used.max()) if self.num_sequences else 0
            if longest > self.max_length:
                raise self._outgrown(longest)
        token = torch.arange(num_tokens, device=cu_seqlens.device, dtype=torch.int32)
        segment = torch.searchsorted(cu_seqlens, token, right=True) - 1
        inside = segment.clamp(max=self.num_sequences)
        row = starts[inside] + F.pad(self.lengths, (0, 1))[inside] + token - cu_seqlens[inside]
        self._plan = _Plan(
            Boundaries.of(cu_seqlens),
            rows=torch.where(segment < self.num_sequences, row, self.num_sequences * self.max_length).long(),
            cu_k=torch.cat((starts, starts[-1:].expand(padding))),
            used_k=F.pad(used, (0, padding)),
            max_used=longest,
        )
        return self._plan
