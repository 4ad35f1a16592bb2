"""Products: the ways in which a linear layer multiplies. A layer gets its product in its `Execution`.

Shape suffixes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.autocast import wide
from parallel_layers.distributed import async_collectives


class Product:
    """The forward product `x W^T + b` of a linear layer.

    There are two kinds. The operators give an ordinary product the gradients of `PLAIN`, and send tokens under its
    GEMMs. A differentiable product has a backward of its own: the operators gather its tokens before it and sum its
    results after it by differentiable collectives, and add the bias last. (A weight with a low-rank adapter is of the
    second kind: `x` is gathered once for both, and `dx` is summed once.)

    Attributes:
        differentiable: The product has a backward of its own.
        transport: Name of the transport of `transports` that the forward needs; None: the layer's choice.
    """

    differentiable: ClassVar[bool] = False
    transport: ClassVar[str | None] = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        """Return `x W^T + b` over any leading dims in `dtype` (None: x's), rounded once."""
        raise NotImplementedError

    def into(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Write `x W^T + b` to rows of an output."""
        out.copy_(self(x, weight, bias, out.dtype))

    def part_of(self, ranks: int) -> Product:
        """Return the product of one rank, which holds `1 / ranks` of the contraction."""
        return self

    def can_multiply(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether this call fits; `PLAIN` multiplies in the calls that do not."""
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Share the product between copies of a layer: a product has no state."""
        return self


class PlainProduct(Product):
    """The product of torch, in the dtype of its operands."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        """Return `x W^T + b` over any leading dims in `dtype` (None: x's), rounded once."""
        if dtype is None or dtype == x.dtype or dtype != wide(x.dtype):
            y = F.linear(x, weight, bias)
            return y if dtype is None else async_collectives.cast(y, dtype)
        y = wide_mm(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias

    def into(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Write `x W^T + b` to rows of an output, in the GEMM itself where the dtypes allow it."""
        if out.dtype == x.dtype and bias is None:
            torch.mm(x, weight.t(), out=out)
        elif out.dtype == x.dtype and bias is not None:
            torch.addmm(bias, x, weight.t(), out=out)
        elif out.dtype == torch.float32 and _multiplies_wide(x):
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
            if bias is not None:
                out.add_(bias)
        else:
            super().into(out, x, weight, bias)


PLAIN = PlainProduct()


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return `a b` in at least fp32."""
    if _multiplies_wide(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(wide(a.dtype)).mm(b.to(wide(b.dtype)))


def add_wide_mm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `wide_mm(a, b)` to `total`, in the GEMM itself where the dtypes allow it."""
    if _multiplies_wide(a) and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(wide_mm(a, b))


def _multiplies_wide(a: Tensor) -> bool:
    """Return whether a GEMM of half-precision operands can write fp32 without fp32 copies of them."""
    return a.is_cuda and a.dtype in (torch.float16, torch.bfloat16)
