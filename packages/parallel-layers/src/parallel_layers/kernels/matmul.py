"""`y = x W^T` whose every element depends on its own row of x and its own row of W alone, to the bit.

cuBLAS chooses a kernel by the whole shape, and with it the order in which an element's products are added: the same row
gives other bits in another batch, and the same column on another number of ranks. Here one tile and one step of the
contraction serve every shape; nothing is split along the contraction and nothing added by atomics. Rows and columns
past the ends are read as zeros and not written.

The contraction can be cut into `leaves` equal parts, each summed from zero by itself in fp32, and their sums added in a
binary tree: ((0 + 1) + (2 + 3)). A rank that holds the first half of the contraction computes, with half the leaves,
the very bits of the left subtree.

The kernel is persistent, as those of `kernels.head`: as many programs as multiprocessors walk the tiles and read
through tensor descriptors. Four leaves keep three accumulators alive, which is what bounds the tile for leaves.

Shape suffixes: M rows, N columns of the result, K contraction.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor

from parallel_layers.kernels.head import _descriptor
from parallel_layers.kernels.head_triton import _tile_of
from parallel_layers.kernels.runtime import cdiv, num_multiprocessors, on_its_device, tl, triton, use_triton

BLOCK_M = 128
BLOCK_N = {False: 256, True: 128}
"""Columns of a tile, wide or narrow. Narrow are those of fp32 results, which leave less shared memory, and those of a
tree, even of a rank that has one leaf of it."""
MAX_LEAVES = 4
_GROUP = 8
_STAGES = {False: 3, True: 4}


def supports_matmul(x: Tensor, weight_NK: Tensor, leaf_size: int | None = None) -> bool:
    """Whether `invariant_matmul` takes these: bf16 or fp16 on a GPU with tensor descriptors, rows of whole 16 bytes.

    `leaf_size`: of the contraction's parts, where it is cut; the answer is the same for every number of them.
    """
    return (
        use_triton(x, weight_NK)
        and x.dtype == weight_NK.dtype != torch.float32
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and x.shape[-1] % 8 == 0
        and x.numel() > 0
        and weight_NK.numel() > 0
        and (leaf_size is None or _step(leaf_size) > 0)
    )


def _step(leaf_size: int) -> int:
    """The step of the contraction: the largest of 64, 32, 16 that ends where a leaf of `leaf_size` ends; 0: none."""
    return next((step for step in (64, 32, 16) if leaf_size % step == 0), 0)


@triton.jit
def _leaf(x, weight, row, column, first, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The sum, from zero, of `steps` steps of the contraction from `first` on: `[BM, BN]` fp32."""
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(steps):
        a = x.load([row, first + step * BK])
        b = weight.load([column, first + step * BK])
        total = tl.dot(a, b.T, total)
    return total


# A leaf of a single step stays a loop: else the compiler takes the sum so far as its accumulator, and rounds elsewhere.
@triton.jit(do_not_specialize=["steps"])
def _matmul_kernel(
    x,
    weight,
    y,
    bias_ptr,
    num_rows,
    num_columns,
    steps,
    LEAVES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """`steps`: of one leaf. `x`, `weight` and `y` are tensor descriptors."""
    tiles_m = tl.cdiv(num_rows, BM)
    tiles_n = tl.cdiv(num_columns, BN)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = _tile_of(index, tiles_m, tiles_n, GROUP)
        row = tile_m * BM
        column = tile_n * BN
        total = _leaf(x, weight, row, column, 0, steps, BM, BN, BK)
        if LEAVES > 1:
            total += _leaf(x, weight, row, column, steps * BK, steps, BM, BN, BK)
        if LEAVES > 2:
            right = _leaf(x, weight, row, column, 2 * steps * BK, steps, BM, BN, BK)
            right += _leaf(x, weight, row, column, 3 * steps * BK, steps, BM, BN, BK)
            total += right
        if bias_ptr is not None:
            columns = column + tl.arange(0, BN)
            total += tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
        y.store([row, column], total.to(y.dtype))


@on_its_device
def invariant_matmul(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    leaves: int = 1,
    in_tree: bool = False,
    dtype: torch.dtype | None = None,
    programs: int | None = None,
) -> Tensor:
    """`x W^T + b`, summed in fp32 and rounded once to `dtype` (default x's): `[M, N]`.

    Args:
        x_MK: `[M, K]`, bf16 or fp16.
        weight_NK: `[N, K]`, likewise.
        bias_N: `[N]`, added in fp32 before rounding.
        leaves: 1, 2 or 4 parts of the contraction.
        in_tree: This rank's leaves are a part of a tree over several ranks: take the tile of the whole tree even for
            one leaf.
        dtype: Of the result: x's or fp32.
        programs: How many walk the tiles; None: one a multiprocessor. It changes no bit.
    """
    assert leaves in (1, 2, MAX_LEAVES)
    tree = in_tree or leaves > 1
    dtype = x_MK.dtype if dtype is None else dtype
    narrow = tree or dtype == torch.float32
    (num_rows, size), num_columns = x_MK.shape, len(weight_NK)
    leaf_size = size // leaves
    block_n, block_k = BLOCK_N[narrow], _step(leaf_size) if tree else 64
    # Rows that a descriptor can write are whole 16 bytes, too.
    y = torch.empty(num_rows, -(-num_columns // 8) * 8, dtype=dtype, device=x_MK.device)[:, :num_columns]
    tiles = cdiv(num_rows, BLOCK_M) * cdiv(num_columns, block_n)
    programs = min(num_multiprocessors(x_MK.device) if programs is None else programs, tiles)
    _matmul_kernel[(programs,)](
        _descriptor(_readable(x_MK), (BLOCK_M, block_k)),
        _descriptor(_readable(weight_NK), (block_n, block_k)),
        _descriptor(y, (BLOCK_M, block_n)),
        None if bias_N is None else bias_N.contiguous(),
        num_rows,
        num_columns,
        cdiv(leaf_size, block_k),
        LEAVES=leaves,
        BM=BLOCK_M,
        BN=block_n,
        BK=block_k,
        GROUP=_GROUP,
        PROGRAMS=programs,
        FLATTEN=leaves == 1,
        num_stages=_STAGES[narrow],
        num_warps=8,
    )
    return y.contiguous()


def _readable(x: Tensor) -> Tensor:
    """`x` as a tensor descriptor can read it: dense rows that begin at multiples of 16 bytes (they mostly do)."""
    dense = x.stride(1) == 1 and x.stride(0) >= x.shape[1]  # rows that were expanded are one and the same
    readable = dense and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if readable else x.clone(memory_format=torch.contiguous_format)
