"""Inference: a contiguous cache of keys and values, for which prefill and decoding are one code path.

Shape legend: T tokens of this forward, N sequences of the cache, L room of each, Q query heads and K key-value heads of
this rank, D head size, S segments of this forward.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from parallel_layers.attention.packed import AttentionOptions, packed_attention


class _Plan(NamedTuple):
    """Where the tokens of one forward go; the same for all its layers.

    Attributes:
        cu_seqlens: What it was made from.
        rows: `[T]` each token's row in the flat cache; the last row, which nobody reads, for tokens that are dropped.
        cu_k: `[S+1]` where each segment's keys start.
        used_k: `[S]` how many keys it has, these tokens' own included; 0 for a padding segment.
        max_used: At least the largest of `used_k`.
    """

    cu_seqlens: Tensor
    rows: Tensor
    cu_k: Tensor
    used_k: Tensor
    max_used: int


class KVCache:
    """Keys (after rotation) and values of N sequences, room for L tokens each.

    Each forward brings any number of new tokens for each sequence (a prompt, one token, none), packed in the order of
    the sequences; further segments are padding and are ignored. Call `advance` once after the last layer.

        cache = KVCache(num_layers, N, L, num_kv_heads_local, head_dim)
        for i, layer in enumerate(layers):
            hidden = layer(hidden, rotary, cu_seqlens, max_seqlen, cache=cache.layer(i))
        cache.advance(cu_seqlens)

    No host synchronisation while the sequences cannot have outgrown the room by the host's own count.

    Args:
        num_layers: Layers that share the sequences' lengths.
        num_sequences: N.
        max_length: L.
        num_kv_heads: K of this rank.
        head_dim: D.
        dtype: Of keys and values.
        device: Where they are.
    """

    def __init__(
        self,
        num_layers: int,
        num_sequences: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.num_sequences, self.max_length = num_sequences, max_length
        shape = (num_layers, num_sequences * max_length + 1, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(num_sequences, dtype=torch.int32, device=self.keys.device)
        self._longest = 0  # at least the longest sequence; the host's own count
        self._plan: _Plan | None = None

    def layer(self, index: int) -> "LayerCache":
        """The part of layer `index`: what `DecoderLayer.forward` takes as `cache`."""
        return LayerCache(self, index)

    def reset(self) -> None:
        """Forget all tokens."""
        self.lengths.zero_()
        self._longest, self._plan = 0, None

    def advance(self, cu_seqlens: Tensor) -> None:
        """Count the tokens of the forward that has ended; `cu_seqlens [S+1]` as it was given to the layers."""
        self.lengths = self.lengths + cu_seqlens.diff()[: self.num_sequences]
        known = self._plan is not None and self._plan.cu_seqlens is cu_seqlens
        self._longest = self._plan.max_used if self._plan is not None and known else int(self.lengths.max())
        self._plan = None

    def plan(self, cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> _Plan:
        """Where the new tokens go.

        Raises:
            ValueError: Fewer segments than sequences, or more tokens than there is room for.
        """
        if self._plan is not None and self._plan.cu_seqlens is cu_seqlens:
            return self._plan
        padding = cu_seqlens.shape[0] - 1 - self.num_sequences
        if padding < 0:
            raise ValueError(
                f"cu_seqlens has {cu_seqlens.shape[0] - 1} segments for a cache of {self.num_sequences} sequences; "
                "give a sequence without new tokens a segment of length 0"
            )
        starts = torch.arange(self.num_sequences + 1, device=cu_seqlens.device, dtype=torch.int32) * self.max_length
        used = self.lengths + cu_seqlens.diff()[: self.num_sequences]
        longest = self._longest + max_seqlen
        if longest > self.max_length:  # perhaps: the longest sequence need not be the one that grows the most
            longest = int(used.max())
            if longest > self.max_length:
                raise ValueError(
                    f"a sequence would have {longest} tokens, but the cache has room for max_length={self.max_length}"
                )
        token = torch.arange(num_tokens, device=cu_seqlens.device, dtype=torch.int32)
        segment = torch.searchsorted(cu_seqlens, token, right=True) - 1
        kept = segment < self.num_sequences
        inside = segment.clamp(max=self.num_sequences - 1)
        row = starts[inside] + self.lengths[inside] + token - cu_seqlens[inside]
        self._plan = _Plan(
            cu_seqlens,
            rows=torch.where(kept, row, self.num_sequences * self.max_length).long(),
            cu_k=torch.cat((starts, starts[-1:].expand(padding))),
            used_k=torch.cat((used, used.new_zeros(padding))),
            max_used=longest,
        )
        return self._plan


class LayerCache:
    """One layer's part of a `KVCache`."""

    def __init__(self, cache: KVCache, index: int) -> None:
        self.cache, self.index = cache, index

    def attend(
        self,
        q_TQD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        /,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:
        """Write these tokens' keys and values behind what their sequences have, and attend to all of it.

        Args:
            q_TQD: `[T, Q, D]` after rotation.
            k_TKD: `[T, K, D]` after rotation.
            v_TKD: `[T, K, D]`.
            cu_seqlens: `[S+1]` int32; segments 0 to N-1 belong to the sequences, later ones are padding.
            max_seqlen: At least the longest segment.
            **options: Those of `packed_attention`.

        Returns:
            `[T, Q, D]`; zero for padding.

        Raises:
            ValueError: Fewer segments than sequences, no room left, or a gradient is asked for.
        """
        if torch.is_grad_enabled() and (q_TQD.requires_grad or k_TKD.requires_grad or v_TKD.requires_grad):
            raise ValueError("a KVCache is for inference; run the model under torch.no_grad()")
        plan = self.cache.plan(cu_seqlens, max_seqlen, q_TQD.shape[0])
        keys, values = self.cache.keys[self.index], self.cache.values[self.index]
        keys.index_copy_(0, plan.rows, k_TKD.to(keys.dtype))
        values.index_copy_(0, plan.rows, v_TKD.to(values.dtype))
        options = {**options, "cu_seqlens_k": plan.cu_k, "max_seqlen_k": plan.max_used, "used_k": plan.used_k}
        k_all, v_all = keys[:-1].to(q_TQD.dtype), values[:-1].to(q_TQD.dtype)
        return packed_attention(q_TQD, k_all, v_all, cu_seqlens, max_seqlen, **options)
