"""`InvariantProduct`: `x W^T` whose bits depend only on an element's own two rows and on the cuts of the contraction.

On Hopper GPUs and later one Triton kernel multiplies bf16 and fp16 (`kernels.matmul`); everywhere else GEMMs are
exact (`kernels.exact`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from parallel_layers.kernels.exact import exact_product
from parallel_layers.kernels.matmul import MAX_LEAVES, invariant_matmul, supports_matmul
from parallel_layers.linear.execution import Execution
from parallel_layers.linear.operators import column_parallel_linear
from parallel_layers.linear.products import Product
from parallel_layers.linear.transports import tree
from parallel_layers.module.autocast import without_autocast

BLOCKS = 4
"""The number of blocks in sums over ranks, by default: for groups of 1, 2 and 4 ranks, which hold whole blocks."""


def check_blocks(blocks: int, tp: int) -> None:
    """Raise ValueError unless `blocks` is a power of two that `tp` divides."""
    if blocks < 1 or blocks & (blocks - 1):
        raise ValueError(f"blocks={blocks} must be a power of two: the sums of the blocks are added as a binary tree")
    if blocks % tp:
        raise ValueError(
            f"tp={tp} does not divide blocks={blocks}, the parts that every sum over the ranks is made of; use tp in "
            f"{{{', '.join(str(1 << n) for n in range(blocks.bit_length()))}}}"
            + (f", or blocks={tp}" if tp & (tp - 1) == 0 else "")
        )


@dataclass(frozen=True)
class InvariantProduct(Product):
    """A GEMM with the same bits at every size of the group; its gradients are the ordinary GEMM's gradients.

    Attributes:
        leaves: Equal parts of this rank's contraction in a row-parallel layer, a power of two. Each part is summed in
            fp32 by itself, and the parts of all ranks are added as one tree. None: a column-parallel layer, whose
            contraction is not cut.
    """

    leaves: int | None = None
    in_tree: ClassVar[bool] = True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return `x W^T + b` over any leading dims in `dtype` (None: x's), rounded once from fp32."""
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
            raise ValueError(
                f"invariant GEMMs take float32, bfloat16 or float16, not {x.dtype} with a weight in {weight.dtype}"
            )
        dtype = x.dtype if dtype is None else dtype
        rows, leaves = x.reshape(-1, x.shape[-1]), self.leaves or 1
        leaf_size = None if self.leaves is None else x.shape[-1] // leaves
        if not supports_matmul(rows, weight, leaf_size):
            operands = zip(rows.chunk(leaves, dim=1), weight.chunk(leaves, dim=1), strict=True)
            y = tree([exact_product(a, b) for a, b in operands])
        elif leaves > MAX_LEAVES:
            groups = leaves // MAX_LEAVES
            operands = zip(rows.chunk(groups, dim=1), weight.chunk(groups, dim=1), strict=True)
            y = tree([invariant_matmul(a, b, leaves=MAX_LEAVES, dtype=torch.float32) for a, b in operands])
        else:
            inside = dtype if dtype == x.dtype else torch.float32
            y = invariant_matmul(rows, weight, bias, leaves=leaves, in_tree=self.leaves is not None, dtype=inside)
            bias = None  # added by the kernel
        y = y if bias is None else y + bias.float()
        return y.to(dtype).view(*x.shape[:-1], len(weight))


_INVARIANT = Execution(product=InvariantProduct())


@without_autocast
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)` whose rows and columns depend on nothing else: `[..., I]` -> `[..., O]`."""
    return column_parallel_linear(x, weight, bias, execution=_INVARIANT)
