"""`InvariantProduct`: `x W^T` whose bits depend only on an element's own two rows and on the cuts of the contraction.

On Hopper GPUs and later one Triton kernel multiplies bf16 and fp16 (`kernels.matmul`); everywhere else products are
exact (`exact.exact_product`).

Shape suffixes: N columns of the result, K contraction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from parallel_layers.autocast import without_autocast
from parallel_layers.kernels.exact_matmul import exact_product
from parallel_layers.kernels.matmul import MAX_LEAVES, invariant_matmul, supports_matmul
from parallel_layers.linear.execution import Execution
from parallel_layers.linear.operators import column_parallel_linear
from parallel_layers.linear.products import Product
from parallel_layers.linear.transports import tree

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class InvariantProduct(Product):
    """A product with the same bits at every size of the group; its gradients are those of the ordinary product.

    Attributes:
        blocks: Equal parts of a row-parallel layer's contraction, a power of two. Each part is summed in fp32 by
            itself, and all parts are added as one tree, on whichever ranks they are. None: a column-parallel layer.
    """

    blocks: int | None = None
    transport: ClassVar[str | None] = "tree"

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        """Return `x W^T + b` in `dtype` (None: x's), rounded once from fp32."""
        return product(x, weight, bias, leaves=self.blocks or 1, in_tree=self.blocks is not None, dtype=dtype)

    def part_of(self, ranks: int) -> InvariantProduct:
        """Return the product of one rank, which holds `blocks / ranks` parts."""
        return self if self.blocks is None else replace(self, blocks=self.blocks // ranks)


_INVARIANT = Execution(product=InvariantProduct())


@without_autocast
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)` whose rows and columns depend on nothing else: `[..., I]` -> `[..., O]`."""
    return column_parallel_linear(x, weight, bias, execution=_INVARIANT)


def product(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    leaves: int = 1,
    in_tree: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `x W^T + b` without a gradient, `[..., K]`, `[N, K]` -> `[..., N]`, rounded once from fp32.

    Args:
        x: `[..., K]`, fp32, bf16 or fp16.
        weight_NK: `[N, K]` in the same dtype.
        bias_N: `[N]`, added in fp32.
        leaves: Equal parts of the contraction, a power of two, each summed by itself; their sums are added as a tree.
        in_tree: These leaves are this rank's part of a larger tree.
        dtype: dtype of the result; None: x's.

    Raises:
        ValueError: Another dtype.
    """
    if x.dtype not in _DTYPES or weight_NK.dtype != x.dtype:
        raise ValueError(
            f"invariant products take float32, bfloat16 or float16, not {x.dtype} with a weight in {weight_NK.dtype}"
        )
    dtype = x.dtype if dtype is None else dtype
    rows = x.reshape(-1, x.shape[-1])
    leaf_size = x.shape[-1] // leaves if in_tree or leaves > 1 else None
    multiply = _by_kernel if supports_matmul(rows, weight_NK, leaf_size) else _exactly
    return multiply(rows, weight_NK, bias_N, leaves, in_tree, dtype).to(dtype).view(*x.shape[:-1], len(weight_NK))


def _exactly(x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, in_tree: bool, dtype: torch.dtype) -> Tensor:
    parts = zip(x.chunk(leaves, dim=1), weight.chunk(leaves, dim=1), strict=True)
    y = tree([exact_product(a, b) for a, b in parts])
    return y if bias is None else y + bias.float()


def _by_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, in_tree: bool, dtype: torch.dtype
) -> Tensor:
    dtype = dtype if dtype == x.dtype else torch.float32
    if leaves <= MAX_LEAVES:
        return invariant_matmul(x, weight, bias, leaves=leaves, in_tree=in_tree, dtype=dtype)
    groups = leaves // MAX_LEAVES
    parts = zip(x.chunk(groups, dim=1), weight.chunk(groups, dim=1), strict=True)
    y = tree([invariant_matmul(a, b, leaves=MAX_LEAVES, dtype=torch.float32) for a, b in parts])
    return y if bias is None else y + bias.float()
