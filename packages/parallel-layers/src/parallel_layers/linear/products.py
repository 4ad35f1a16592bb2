"""`Product`: the GEMM of a linear layer, in several forms. A layer gets its `Product` in its `Execution`.

Shape suffixes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.device.names import GPU
from parallel_layers.distributed import async_collectives
from parallel_layers.kernels import quack
from parallel_layers.kernels.runtime import device_type
from parallel_layers.module.autocast import wide
from parallel_layers.training.weight_gradients import Destination


class Product:
    """The forward GEMM `x W^T + b` of a linear layer: here torch's or quack's, in the dtype of the operands.

    The operators write the backward, unless the GEMM is `differentiable`.

    Attributes:
        differentiable: Autograd computes the backward: the operators use differentiable collectives before and after
            the GEMM, and add the bias last.
        in_tree: Sums over the ranks are added as one tree; see `transports`.
        serial: Transports call the GEMM once, with all tokens.
        frozen: The weight is frozen, in a form that only this class reads.
    """

    differentiable: ClassVar[bool] = False
    in_tree: ClassVar[bool] = False
    serial: ClassVar[bool] = False
    frozen: ClassVar[bool] = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return `x W^T + b` over any leading dims in `dtype` (None: x's), rounded once."""
        differentiated = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        if not differentiated and has_kernel(x, weight, bias):
            y = x.new_empty(*x.shape[:-1], len(weight), dtype=dtype)
            multiply_into(y.view(-1, len(weight)), x.reshape(-1, x.shape[-1]), weight, None)
            return y
        if dtype is None or dtype == x.dtype or dtype != wide(x.dtype):
            y = F.linear(x, weight, bias)
            return y if dtype is None else async_collectives.cast(y, dtype)
        rows, columns = x.reshape(-1, x.shape[-1]), weight.t()
        wide_mm = (
            torch.mm(rows, columns, out_dtype=dtype) if _multiplies_wide(x) else rows.to(dtype) @ columns.to(dtype)
        )
        y = wide_mm.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias

    def transposed(self) -> Product:
        """Return the GEMM of the backward's `dx = dy W`, which is called with the transposed weight."""
        return PLAIN

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Share the instance between copies of a layer: it has no state."""
        return self


PLAIN = Product()


class LowRankProduct(Product):
    """The GEMMs of a weight with a low-rank adapter, `x W^T + b + (x D^T) U^T`: down `[R, I]`, up `[O, R]`.

    `base` is the GEMM with the weight.
    """

    serial: ClassVar[bool] = True

    def __init__(self, down: Tensor, up: Tensor, base: Product = PLAIN) -> None:
        self.down, self.up, self.base = down, up, base
        self._inner: Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the sum of both terms; `Product.__call__` has the arguments."""
        y = self.base(x, weight, bias, dtype)
        self._inner = inner = F.linear(x, self.down)
        if y.dtype != x.dtype:
            return y.add_(PLAIN(inner, self.up, None, y.dtype))
        y.view(-1, y.shape[-1]).addmm_(inner.reshape(-1, inner.shape[-1]), self.up.t())
        return y

    def take_inner(self) -> Tensor:
        """Return `x D^T` `[..., R]` of the last call, for the gradients of the factors, and forget it.

        A pipeline keeps the graphs of all micro-batches, and with them this object.
        """
        inner, self._inner = self._inner, None
        assert inner is not None
        return inner


def has_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether quack multiplies the operands (`kernels.quack`)."""
    return (
        bias is None and x.dtype == torch.bfloat16 and x.numel() > 0 and quack.takes(x.reshape(-1, x.shape[-1]), weight)
    )


def is_torch_alone(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether torch's own linear serves: quack does not multiply, nor would autograd copy a large gradient."""
    if has_kernel(x, weight, bias):
        return False
    destination = Destination.of(weight)
    adds = weight.requires_grad and (destination.parameter is not None or destination.dtype != weight.dtype)
    return not (adds and device_type(x.device) == GPU and x.numel() * len(weight) >= quack.MIN_WORK)


def multiply_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Write `PLAIN(x, weight, bias)` to rows of an output, in the GEMM itself where the dtypes allow it."""
    if bias is None and out.dtype in (x.dtype, torch.float32) and quack.takes(x, weight):
        quack.multiply(x, weight, out, quack.LARGE)
    elif out.dtype == x.dtype and bias is None:
        torch.mm(x, weight.t(), out=out)
    elif out.dtype == x.dtype and bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
    elif out.dtype == torch.float32 and _multiplies_wide(x):
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        if bias is not None:
            out.add_(bias)
    else:
        out.copy_(PLAIN(x, weight, bias, out.dtype))


def add_product_(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add `x W^T` to `out` `[T, O]`, of the operands' dtype or fp32, in fp32; the sum is rounded once."""
    if quack.takes(x, weight):
        quack.multiply(x, weight, out, quack.LARGE, add=True)
    elif out.dtype == x.dtype:
        out.addmm_(x, weight.t())
    elif _multiplies_wide(x):
        torch.addmm(out, x, weight.t(), out_dtype=out.dtype, out=out)
    else:
        out.add_(PLAIN(x, weight, None, out.dtype))


def _multiplies_wide(a: Tensor) -> bool:
    """Return whether a GEMM of half-precision operands can write fp32 without fp32 copies of them."""
    return device_type(a.device) == GPU and a.dtype in (torch.float16, torch.bfloat16)
