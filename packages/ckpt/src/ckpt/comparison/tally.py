"""Compare two tensors chunk by chunk, bit by bit or within a tolerance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt.comparison.report import Difference
from ckpt.layout.pieces import Box


@dataclass
class Tally:
    """Running comparison of one tensor, chunk by chunk."""

    atol: float
    rtol: float
    elements: int = 0
    worst: float = 0.0
    first: tuple[int, ...] = ()

    def add(self, a: Tensor, b: Tensor, at: Box) -> None:
        """Compare two chunks; `at` is their box in the tensor."""
        if self.atol == self.rtol == 0 and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
            return
        exact = _bits(a) != _bits(b) if a.dtype == b.dtype else a.double() != b.double()
        a, b = a.double(), b.double()
        gap = (a - b).abs()
        close = gap <= self.atol + self.rtol * b.abs()
        both_nan = a.isnan() & b.isnan()
        differs = exact if self.atol == self.rtol == 0 else ~(close | both_nan | (a == b))
        count = int(differs.sum())
        if not count:
            return
        if not self.elements:
            index = torch.nonzero(differs.reshape(a.shape))[0].tolist()
            self.first = tuple(
                start + offset for (start, _), offset in zip(at[len(at) - len(index) :], index, strict=True)
            )
        self.elements += count
        gaps = gap[differs].nan_to_num(nan=float("inf"))
        self.worst = max(self.worst, float(gaps.max()))

    def difference(self, name: str) -> Difference | None:
        """Return the difference of all chunks; None without a difference."""
        if not self.elements:
            return None
        detail = f"{self.elements} elements differ, first at {list(self.first)}, by at most {self.worst:.6g}"
        return Difference(name, "values", detail, self.elements, self.worst, self.first)


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements' bits as integers, so that NaN equals itself and -0.0 is not 0.0."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()])
