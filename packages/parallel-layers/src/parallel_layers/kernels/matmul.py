"""A GEMM `y = x W^T` in which the bits of an element depend only on its row of x and its row of W.

cuBLAS chooses the order of summation by the whole shape. This kernel uses one tile size for all shapes, no split-K and
no atomics; few rows go to smaller tiles (`kernels.matmul_tiles`) with the same sums. The contraction can be cut into
`leaves` equal parts. Each part is summed in fp32, and the sums are added in a binary tree: ((0 + 1) + (2 + 3)). A rank
with the first half of the contraction and half the leaves computes exactly the bits of the left subtree.

The kernel is persistent (one program per multiprocessor) and reads through tensor descriptors. One program computes
all leaves of a tile: registers hold one leaf's sum, and scratch in the L2 cache holds the sums that wait for the tree.

Shape suffixes: M rows, N columns of the result, K contraction.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor

from parallel_layers.kernels.head_triton import _tile_of, descriptor
from parallel_layers.kernels.matmul_tiles import MOST_ROWS, few_rows_matmul
from parallel_layers.kernels.runtime import capability, cdiv, num_multiprocessors, on_its_device, tl, triton, use_triton

BLOCK_M, BLOCK_N = 128, 256
_PARTS = 4
"""Groups of columns in which a tile is finished; this leaves shared memory for loading the next tile."""
MAX_LEAVES = 4
_GROUP = 8
_STAGES = 3


def supports_matmul(x: Tensor, weight_NK: Tensor, leaf_size: int | None = None) -> bool:
    """Return True if `invariant_matmul` takes these tensors: bf16 or fp16 on Hopper or newer, rows of whole 16 bytes.

    `leaf_size` is the size of a part of the contraction; None: the contraction is not cut.
    """
    return (
        use_triton(x, weight_NK)
        and x.dtype == weight_NK.dtype != torch.float32
        and capability(x.device) >= (9, 0)
        and x.shape[-1] % 8 == 0
        and x.numel() > 0
        and weight_NK.numel() > 0
        and (leaf_size is None or _step(leaf_size) > 0)
    )


def step_of(size: int, leaves: int, *, in_tree: bool) -> int:
    """Return the step of a contraction in these leaves; leaves of a tree over ranks have one step."""
    return _step(size // leaves) if in_tree or leaves > 1 else 64


def _step(leaf_size: int) -> int:
    """Return the step of the contraction: the largest of 64, 32, 16 that divides `leaf_size`, or 0."""
    return next((step for step in (64, 32, 16) if leaf_size % step == 0), 0)


@triton.jit
def _halves(x):
    """Return the left and the right half of the columns: `[M, 2 N]` -> two `[M, N]`."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _finish(total, leaf, row, column, y, bias_ptr, scratch_ptr, num_columns, LEAVES: tl.constexpr):
    """Add the earlier leaves in the tree to a leaf's sums `part [M, N]`; write the root to `y`, other sums to scratch.

    Leaves 0 and 1 share the first slot of scratch, 2 and 3 the second. Loads and stores of scratch have the same
    layout: each thread reads its own writes, so no barrier is needed.
    """
    M: tl.constexpr = total.shape[0]
    N: tl.constexpr = total.shape[1]
    root = scratch_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    slot = root + (leaf // 2) * (M * N)
    # Masks instead of branches: the compiler cannot fuse branches with results into the loop over the contraction.
    if LEAVES > 1:
        earlier = tl.load(slot, mask=tl.full((M, N), leaf % 2 == 1, tl.int1), other=0.0)
        total = tl.where(leaf % 2 == 1, earlier + total, total)
    if LEAVES > 2:
        earlier = tl.load(root, mask=tl.full((M, N), leaf == 3, tl.int1), other=0.0)
        total = tl.where(leaf == 3, earlier + total, total)
    if leaf == LEAVES - 1:
        if bias_ptr is None:
            y.store([row, column], total.to(y.dtype))
        else:
            columns = column + tl.arange(0, N)
            bias = tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
            y.store([row, column], (total + bias[None, :]).to(y.dtype))
    # The store is last: Triton 3.6 cannot fuse a loop that ends with a branch either.
    if LEAVES > 1:
        tl.store(slot, total, mask=tl.full((M, N), leaf < LEAVES - 1, tl.int1))


# Without specialisation a leaf of one step stays a loop. Unrolled, the compiler would round in a different place.
@triton.jit(do_not_specialize=["steps"])
def _matmul_kernel(
    x,
    weight,
    y,
    bias_ptr,
    scratch_ptr,
    num_rows,
    num_columns,
    steps,
    LEAVES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Compute y; `x`, `weight` and `y` are tensor descriptors, scratch is `[PROGRAMS, 4, 2, BM, BN / 4]`.

    `steps` is the number of steps of one leaf.
    """
    tiles_m = tl.cdiv(num_rows, BM)
    tiles_n = tl.cdiv(num_columns, BN)
    program = tl.program_id(0)
    tiles = tl.cdiv(tiles_m * tiles_n - program, PROGRAMS)
    N: tl.constexpr = BN // 4
    for index in tl.range(tiles * LEAVES, flatten=True):
        tile_m, tile_n = _tile_of(program + index // LEAVES * PROGRAMS, tiles_m, tiles_n, GROUP)
        leaf = index % LEAVES
        row = tile_m * BM
        column = tile_n * BN
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(steps):
            a = x.load([row, (leaf * steps + step) * BK])
            b = weight.load([column, (leaf * steps + step) * BK])
            total = tl.dot(a, b.T, total)
        left_half, right_half = _halves(total)
        part_0, part_1 = _halves(left_half)
        part_2, part_3 = _halves(right_half)
        scratch = scratch_ptr + program * (2 * BM * BN)
        _finish(part_0, leaf, row, column, y, bias_ptr, scratch, num_columns, LEAVES)
        _finish(part_1, leaf, row, column + N, y, bias_ptr, scratch + 2 * BM * N, num_columns, LEAVES)
        _finish(part_2, leaf, row, column + 2 * N, y, bias_ptr, scratch + 4 * BM * N, num_columns, LEAVES)
        _finish(part_3, leaf, row, column + 3 * N, y, bias_ptr, scratch + 6 * BM * N, num_columns, LEAVES)


@on_its_device
def invariant_matmul(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    leaves: int = 1,
    in_tree: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `x W^T + b` `[M, N]`, summed in fp32 and rounded once.

    Args:
        x_MK: `[M, K]`, bf16 or fp16.
        weight_NK: `[N, K]`, in x's dtype.
        bias_N: `[N]`, added in fp32 before rounding.
        leaves: Parts of the contraction: 1, 2 or 4.
        in_tree: The leaves belong to a tree over several ranks; a single leaf then has the same steps as the tree.
        dtype: dtype of the result, x's or fp32 (default: x's).
    """
    assert leaves in (1, 2, MAX_LEAVES)
    dtype = x_MK.dtype if dtype is None else dtype
    (num_rows, size), num_columns = x_MK.shape, len(weight_NK)
    leaf_size = size // leaves
    block_k = step_of(size, leaves, in_tree=in_tree)
    if num_rows <= MOST_ROWS:
        return few_rows_matmul(
            _readable(x_MK), _readable(weight_NK), bias_N, leaves=leaves, block_k=block_k, dtype=dtype
        )
    # A tensor descriptor writes rows of whole 16 bytes.
    y = torch.empty(num_rows, -(-num_columns // 8) * 8, dtype=dtype, device=x_MK.device)[:, :num_columns]
    tiles = cdiv(num_rows, BLOCK_M) * cdiv(num_columns, BLOCK_N)
    programs = min(num_multiprocessors(x_MK.device), tiles)
    scratch = y.new_empty(programs, _PARTS if leaves > 1 else 0, 2, BLOCK_M, BLOCK_N // _PARTS, dtype=torch.float32)
    _matmul_kernel[(programs,)](
        descriptor(_readable(x_MK), (BLOCK_M, block_k)),
        descriptor(_readable(weight_NK), (BLOCK_N, block_k)),
        descriptor(y, (BLOCK_M, BLOCK_N // _PARTS)),
        None if bias_N is None else bias_N.contiguous(),
        scratch,
        num_rows,
        num_columns,
        cdiv(leaf_size, block_k),
        LEAVES=leaves,
        BM=BLOCK_M,
        BN=BLOCK_N,
        BK=block_k,
        GROUP=_GROUP,
        PROGRAMS=programs,
        num_stages=_STAGES,
        num_warps=8,
    )
    return y.contiguous()


def _readable(x: Tensor) -> Tensor:
    """Return `x`, copied unless its rows are dense and begin at multiples of 16 bytes, as tensor descriptors need."""
    dense = x.stride(1) == 1 and x.stride(0) >= x.shape[1]  # expanded rows have stride 0
    readable = dense and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if readable else x.clone(memory_format=torch.contiguous_format)
