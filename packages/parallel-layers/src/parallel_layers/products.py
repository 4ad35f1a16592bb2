"""Matrix products of linear layers: in the dtype that is asked for, rounded once, into memory that is there.

Shape suffixes: T tokens, I input features, O output features.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.distributed import async_collectives


def product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """`x W^T + b` over any leading dims in `dtype` (None: x's), rounded once."""
    if dtype is None or dtype == x.dtype or dtype != wide(x.dtype):
        y = F.linear(x, weight, bias)
        return y if dtype is None else async_collectives.cast(y, dtype)
    y = wide_mm(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def wide(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """`a b` with at least fp32 results."""
    if _multiplies_wide(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(wide(a.dtype)).mm(b.to(wide(b.dtype)))


def add_wide_mm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `wide_mm(a, b)` to `total`, in the product itself where that can be had."""
    if _multiplies_wide(a) and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(wide_mm(a, b))


def _multiplies_wide(a: Tensor) -> bool:
    """Whether products of half-precision numbers can be written in fp32 without a copy of them in fp32."""
    return a.is_cuda and a.dtype in (torch.float16, torch.bfloat16)


def product_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Write `x W^T + b` to rows of an output: `product` without memory of its own, where that can be had."""
    if out.dtype == x.dtype and bias is None:
        torch.mm(x, weight.t(), out=out)
    elif out.dtype == x.dtype and bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
    elif out.dtype == torch.float32 and _multiplies_wide(x):
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        if bias is not None:
            out.add_(bias)
    else:
        out.copy_(product(x, weight, bias, out.dtype))
