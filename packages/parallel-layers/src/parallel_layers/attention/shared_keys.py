"""`SharedKeys`: the key side of a pack in which several segments attend to the same tokens.

Shape legend: T tokens, J rows of the key side, Q query heads, K key-value heads, D head size, S segments.
"""

from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from parallel_layers.attention.packed import AttentionOptions, packed_attention
from parallel_layers.module.autocast import wide


@dataclass(frozen=True)
class SharedKeys:
    """The tokens to which each segment of a pack attends, when these are not the segment alone.

    The queries of a segment are the last of its keys: query i of n_q attends to keys up to i + n_k - n_q.

    Attributes:
        index: `[J]` int64, a token for each row of the key side, segment by segment.
        cu_seqlens: `[S+1]` int32 boundaries of the segments among these rows.
        max_seqlen: Maximum number of keys of a segment.
    """

    index: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    def to(self, device: torch.device | str) -> "SharedKeys":
        """Return the same on another device."""
        return replace(self, index=self.index.to(device), cu_seqlens=self.cu_seqlens.to(device))

    def with_padding(self, tokens: Tensor, replaced: int) -> "SharedKeys":
        """Return the key side with a last segment of `tokens`, which attends to itself.

        It replaces the last segment if that has `replaced` > 0 tokens of padding.
        """
        index = torch.cat([self.index[: len(self.index) - replaced], tokens])
        bounds = self.cu_seqlens[:-1] if replaced else self.cu_seqlens
        end = bounds.new_full((1,), len(index))
        return SharedKeys(index, torch.cat([bounds, end]), max(self.max_seqlen, len(tokens)))

    def rows(self, x_TKD: Tensor) -> Tensor:
        """Return the keys or values of the key side, `[J, K, D]`."""
        return repeated_rows(x_TKD, self.index)

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
        """Compute `packed_attention` of the segments `cu_seqlens` over their keys, `[T, Q, D]`.

        The backward saves the J rows of keys and values.
        """
        options |= {"cu_seqlens_k": self.cu_seqlens, "max_seqlen_k": self.max_seqlen}
        return packed_attention(q_TQD, self.rows(k_TKD), self.rows(v_TKD), cu_seqlens, max_seqlen, **options)


def repeated_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows `x[index]`, with repeats; the backward sums the gradients of a row in at least fp32."""
    rows: Tensor = _Rows.apply(x, index)
    return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.shape, dtype=wide(gradient.dtype))
        return total.index_add_(0, index, gradient.to(total.dtype)).to(gradient.dtype), None
