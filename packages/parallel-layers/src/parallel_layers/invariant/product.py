"""`x W^T` whose bits depend on an element's own two rows, and on where the contraction is cut, alone.

On Hopper GPUs and later, bf16 and fp16 are multiplied by one Triton kernel (`kernels.matmul`); everywhere else products
are exact (`exact.exact_product`).

Shape suffixes: N columns of the result, K contraction.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_layers.kernels.exact_matmul import exact_product
from parallel_layers.kernels.matmul import MAX_LEAVES, invariant_matmul, supports_matmul

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def product(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    leaves: int = 1,
    in_tree: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`x W^T + b`, no gradient: `[..., K]`, `[N, K]` -> `[..., N]` in `dtype` (default x's), rounded once from fp32.

    Args:
        x: `[..., K]`, fp32, bf16 or fp16.
        weight_NK: `[N, K]` in the same dtype.
        bias_N: `[N]`, added in fp32.
        leaves: Equal parts of the contraction, a power of two, which are summed by themselves and added as a tree.
        in_tree: These leaves are this rank's part of a larger tree.
        dtype: Of the result.

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


def tree(parts: Sequence[Tensor]) -> Tensor:
    """The sum of a power of two of tensors, neighbours first: ((0 + 1) + (2 + 3))."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
