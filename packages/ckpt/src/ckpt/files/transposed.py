"""Matrices that files hold transposed, as the values of their canonical shape."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ckpt.files.header import TensorInfo
from ckpt.layout.pieces import Box, exchanged, split_box


@dataclass(frozen=True, slots=True)
class Transposed(TensorInfo):
    """A stack of matrices `[..., N, K]`, stored as `[..., K, N]`; `shape` is `[..., N, K]`.

    Attributes:
        stored: The stored tensor.
    """

    stored: TensorInfo

    @classmethod
    def of(cls, stored: TensorInfo) -> Self:
        """Return the transposed view of a stored tensor."""
        return cls(stored.dtype, exchanged(stored.shape), stored.offset, stored)

    def parts(self, box: Box, limit: int) -> Iterator[Box]:
        """Cut a box along the stored order into boxes of at most `limit` elements."""
        return map(exchanged, split_box(exchanged(box), limit))
