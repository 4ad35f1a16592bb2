"""Compare two tensors chunk by chunk, bit by bit or within a tolerance."""

from collections.abc import Iterator
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
        exact, same_type = self.atol == self.rtol == 0, a.dtype == b.dtype
        if exact and same_type and torch.equal(_bits(a), _bits(b)):
            return
        gap = (a.double() - b.double()).abs()
        if exact:
            differs = _bits(a) != _bits(b) if same_type else a.double() != b.double()
        else:
            differs = ~torch.isclose(a.double(), b.double(), self.rtol, self.atol, equal_nan=True)
        if not differs.any():
            return
        if not self.elements:
            index = torch.nonzero(differs.reshape(a.shape))[0].tolist()
            starts = [start for start, _ in at[len(at) - len(index) :]]
            self.first = tuple(start + offset for start, offset in zip(starts, index, strict=True))
        self.elements += int(differs.sum())
        self.worst = max(self.worst, float(gap[differs].nan_to_num(nan=float("inf")).max()))

    def differences(self, name: str) -> Iterator[Difference]:
        """Yield the difference of all chunks, if there is one."""
        if self.elements:
            detail = f"{self.elements} elements differ, first at {list(self.first)}, by at most {self.worst:.6g}"
            yield Difference(name, "values", detail, self.elements, self.worst, self.first)


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements' bits as integers, so that NaN equals itself and -0.0 is not 0.0."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()])
