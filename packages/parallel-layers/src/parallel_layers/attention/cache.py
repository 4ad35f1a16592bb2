"""Caches of keys and values as attention layers see them; `parallel_layers.inference` has the caches.

Shape legend: T tokens of this forward, N sequences of the cache, Q query heads and K key-value heads of this rank,
D head size, D' size of a value head, S segments of this forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from parallel_layers.attention.packed import AttentionOptions
from parallel_layers.linear_attention.cache import LayerStates


class CacheShape(NamedTuple):
    """The shape of a token's entry in the cache of one layer, on one rank.

    Attributes:
        num_kv_heads: Key-value heads.
        head_dim: Size of a key.
        value_dim: Size of a value.
        values_in_keys: The value is the first `value_dim` dims of the key.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int
    values_in_keys: bool = False


class SequenceCache(ABC):
    """Keys (after rotation) and values of N sequences.

        for i, layer in enumerate(layers):
            hidden = layer(hidden, rotary, cu_seqlens, max_seqlen, cache=cache.layer(i))
        cache.advance(cu_seqlens)

    Attributes:
        num_sequences: N; the first N segments of a forward continue the sequences, further segments are padding.
        max_length: Maximum number of tokens in a sequence.
        lengths: `[N]` int32, the tokens of each sequence, on the cache's device.
    """

    num_sequences: int
    max_length: int

    @property
    @abstractmethod
    def lengths(self) -> Tensor: ...  # noqa: D102

    def layer(self, index: int) -> LayerCache:
        """Return the part of layer `index`, the argument `cache` of `DecoderLayer.forward`."""
        return LayerCache(self, index)

    @abstractmethod
    def advance(self, cu_seqlens: Tensor) -> None:
        """Add the tokens of the finished forward to the lengths; call it after the last layer."""

    @abstractmethod
    def starts(self, cu_seqlens: Tensor) -> bool:
        """See `LayerCache.starts`."""

    @abstractmethod
    def store(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor) -> None:
        """See `LayerCache.store`."""

    @abstractmethod
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

    @abstractmethod
    def states(self, layer: int, cu_seqlens: Tensor) -> LayerStates:
        """See `LayerCache.states`."""


class LayerCache:
    """The part of a cache for one layer."""

    def __init__(self, cache: SequenceCache, index: int) -> None:
        self.cache, self.index = cache, index

    def starts(self, cu_seqlens: Tensor) -> bool:
        """Return whether this forward's tokens begin their sequences."""
        return self.cache.starts(cu_seqlens)

    def store(self, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, /) -> None:
        """Write keys and values as `attend` does, for a layer that computes attention itself."""
        self._check_no_gradient(k_TKD, v_TKD)
        self.cache.store(self.index, k_TKD, v_TKD, cu_seqlens)

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
        """Append these tokens' keys and values to their sequences, and attend to all keys of each sequence.

        Args:
            q_TQD: `[T, Q, D]` after rotation.
            k_TKD: `[T, K, D]` after rotation.
            v_TKD: `[T, K, D']`.
            cu_seqlens: `[S+1]` int32; segments 0 to N-1 belong to the sequences, later segments are padding.
            max_seqlen: Upper bound of a segment's length.
            **options: Options of `packed_attention`.

        Returns:
            `[T, Q, D']`; arbitrary for padding.

        Raises:
            ValueError: There are fewer segments than sequences, there is no room, or an input requires a gradient.
        """
        self._check_no_gradient(q_TQD, k_TKD, v_TKD)
        return self.cache.attend(self.index, q_TQD, k_TKD, v_TKD, cu_seqlens, max_seqlen, options)

    def states(self, x: Tensor, cu_seqlens: Tensor) -> LayerStates:
        """Return the operators of a layer with linear attention for its tokens `x` `[T, ...]`.

        `cu_seqlens` is as for `attend`; outputs are arbitrary for padding.

        Raises:
            ValueError: As for `attend`.
        """
        self._check_no_gradient(x)
        return self.cache.states(self.index, cu_seqlens)

    def _check_no_gradient(self, *tensors: Tensor) -> None:
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise ValueError("a cache is for inference; run the model under torch.no_grad()")
