"""The base class of caches of keys and values, and a layer's view of a cache.

Shape legend: T tokens of this forward, N sequences of the cache, Q query heads and K key-value heads of this rank,
D head size, D' size of a value head, S segments of this forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self, Unpack

import torch
from torch import Tensor

from parallel_layers.attention.packed import AttentionOptions


class Boundaries(NamedTuple):
    """The `cu_seqlens` of a forward's plan, and their version at that time."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> Self:
        """Return the boundaries as they are now; later in-place writes invalidate the plan."""
        return cls(cu_seqlens, _version(cu_seqlens))

    def are(self, cu_seqlens: Tensor) -> bool:
        """Return whether the plan is for `cu_seqlens`, without waiting for the device."""
        return self.tensor is cu_seqlens and self.version == _version(cu_seqlens)


def _version(x: Tensor) -> int:
    """Return how often a tensor has been written to; torch.inference_mode does not count writes."""
    return 0 if x.is_inference() else x._version


class SequenceCache(ABC):
    """Keys (after rotation) and values of N sequences.

    Each forward brings any number of new tokens for each sequence, packed in the order of the sequences; further
    segments are padding. Call `advance` once after the last layer.

        for i, layer in enumerate(layers):
            hidden = layer(hidden, rotary, cu_seqlens, max_seqlen, cache=cache.layer(i))
        cache.advance(cu_seqlens)

    Between two forwards `select` keeps, reorders or repeats sequences, and `free` empties sequences. All forwards may
    write their `cu_seqlens` to one buffer; a buffer made under torch.inference_mode only after `advance`.

    Keys and values have the dtype of the first stored keys, unless the cache is built with another. Queries are cast to
    the dtype of the cache.

    Attributes:
        num_sequences: N.
        max_length: The most tokens of a sequence.
        dtype: The dtype of keys and values; None before the first keys are stored.
        lengths: `[N]` int32, the tokens of each sequence, on the cache's device.
    """

    num_sequences: int
    max_length: int
    dtype: torch.dtype | None
    lengths: Tensor

    def layer(self, index: int) -> "LayerCache":
        """Return the part of layer `index`, the argument `cache` of `DecoderLayer.forward`."""
        return LayerCache(self, index)

    def reset(self) -> None:
        """Forget all tokens."""
        self.free(range(self.num_sequences))

    @abstractmethod
    def advance(self, cu_seqlens: Tensor) -> None:
        """Add the tokens of the finished forward to the lengths; `cu_seqlens` `[S+1]` as given to the layers."""

    @abstractmethod
    def select(self, sequences: Sequence[int]) -> None:
        """Keep these sequences, in this order; repeated sequences are samples of one prompt.

        Raises:
            ValueError: There is no such sequence.
        """

    @abstractmethod
    def free(self, sequences: Sequence[int]) -> None:
        """Empty these sequences; others can start in their places.

        Raises:
            ValueError: There is no such sequence.
        """

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Return whether all sequences are empty, by the host's own count."""

    @abstractmethod
    def store(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> None:
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

    def _check_sequences(self, sequences: Sequence[int]) -> None:
        for n in sequences:
            if not 0 <= n < self.num_sequences:
                raise ValueError(f"there is no sequence {n} in a cache of {self.num_sequences}, numbered from 0")

    def _check_segments(self, cu_seqlens: Tensor) -> int:
        """Return the number of padding segments behind the sequences."""
        padding = cu_seqlens.shape[0] - 1 - self.num_sequences
        if padding < 0:
            raise ValueError(
                f"cu_seqlens has {cu_seqlens.shape[0] - 1} segments for a cache of {self.num_sequences} sequences; "
                "give a sequence without new tokens a segment of length 0"
            )
        return padding

    def _outgrown(self, length: int) -> ValueError:
        return ValueError(
            f"a sequence would have {length} tokens, but the cache has room for max_length={self.max_length}"
        )


class LayerCache:
    """The part of a cache for one layer."""

    def __init__(self, cache: SequenceCache, index: int) -> None:
        self.cache, self.index = cache, index

    @property
    def is_empty(self) -> bool:
        """Return whether all sequences are empty, so that new tokens attend to themselves alone."""
        return self.cache.is_empty

    def store(self, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, max_seqlen: int, /) -> None:
        """Write keys and values as `attend` does, for a layer that computes attention itself.

        Raises:
            ValueError: As for `attend`.
        """
        self._check_no_gradient(k_TKD, v_TKD)
        self.cache.store(self.index, k_TKD, v_TKD, cu_seqlens, max_seqlen)

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
            cu_seqlens: `[S+1]` int32; segments 0 to N-1 belong to the sequences, later ones are padding.
            max_seqlen: At least the length of the longest segment.
            **options: Options of `packed_attention`.

        Returns:
            `[T, Q, D']`; zero for padding.

        Raises:
            ValueError: There are fewer segments than sequences, there is no room, or an input requires a gradient.
        """
        self._check_no_gradient(q_TQD, k_TKD, v_TKD)
        return self.cache.attend(self.index, q_TQD, k_TKD, v_TKD, cu_seqlens, max_seqlen, options)

    def _check_no_gradient(self, *tensors: Tensor) -> None:
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise ValueError(f"a {type(self.cache).__name__} is for inference; run the model under torch.no_grad()")
