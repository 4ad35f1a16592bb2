"""`y = x W^T` whose every element depends on its own row of x and its own row of W alone, to the bit.

cuBLAS chooses a kernel by the whole shape, and with it the order in which an element's products are added: the same row
gives other bits in another batch, and the same column on another number of ranks. Here one tile and one step of the
contraction serve every shape; nothing is split along the contraction and nothing added by atomics. Rows and columns
past the ends are read as zeros and not written.

The contraction can be cut into `leaves` equal parts, each summed from zero by itself in fp32, and their sums added in a
binary tree: ((0 + 1) + (2 + 3)). A rank that holds the first half of the contraction computes, with half the leaves,
the very bits of the left subtree.

The kernel is persistent, as those of `kernels.head`: as many programs as multiprocessors walk the tiles and read
through tensor descriptors. All leaves of a tile are one program's, one after the other. Registers hold one leaf's sum
alone; what the tree still waits for is in the program's own scratch, which is small enough for the L2 cache.

Shape suffixes: M rows, N columns of the result, K contraction.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor

from parallel_layers.kernels.head import _descriptor
from parallel_layers.kernels.head_triton import _tile_of
from parallel_layers.kernels.runtime import cdiv, num_multiprocessors, on_its_device, tl, triton, use_triton

BLOCK_M, BLOCK_N = 128, 256
_PARTS = 4
"""A tile is finished in so many groups of columns, so that shared memory is left for the copies of the next one."""
MAX_LEAVES = 4
_GROUP = 8
_STAGES = 3


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
def _halves(x):
    """The left and the right columns of `[M, 2 N]`: `[M, N]` each."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _finish(part, leaf, row, column, y, bias_ptr, scratch_ptr, num_columns, LEAVES: tl.constexpr):
    """Add to a leaf's sums `part [M, N]` those that it completes; write the whole tree's to `y`, others to scratch.

    Sums of two leaves go to the left one's slot: 0 and 1 to the first, 2 and 3 to the second. Loads and stores of
    scratch have one layout, so a thread reads what it wrote itself, and nothing has to wait.
    """
    M: tl.constexpr = part.shape[0]
    N: tl.constexpr = part.shape[1]
    root = scratch_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    slot = root + (leaf // 2) * (M * N)
    # Masks, not branches with a result: of these the compiler cannot make one loop with that over the contraction.
    if LEAVES > 1:
        left = tl.load(slot, mask=tl.full((M, N), leaf % 2 == 1, tl.int1), other=0.0)
        part = tl.where(leaf % 2 == 1, left + part, part)
    if LEAVES > 2:
        left = tl.load(root, mask=tl.full((M, N), leaf == 3, tl.int1), other=0.0)
        part = tl.where(leaf == 3, left + part, part)
    if leaf == LEAVES - 1:
        if bias_ptr is None:
            y.store([row, column], part.to(y.dtype))
        else:
            columns = column + tl.arange(0, N)
            bias = tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
            y.store([row, column], (part + bias[None, :]).to(y.dtype))
    # The store is last: neither does Triton 3.6 make one loop of one that ends with a branch.
    if LEAVES > 1:
        tl.store(slot, part, mask=tl.full((M, N), leaf < LEAVES - 1, tl.int1))


# A leaf of a single step stays a loop: else the compiler takes the sum so far as its accumulator, and rounds elsewhere.
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
    """`steps`: of one leaf. `x`, `weight` and `y` are tensor descriptors; scratch is `[PROGRAMS, 4, 2, BM, BN / 4]`."""
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
        left, right = _halves(total)
        part_0, part_1 = _halves(left)
        part_2, part_3 = _halves(right)
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
    programs: int | None = None,
) -> Tensor:
    """`x W^T + b`, summed in fp32 and rounded once to `dtype` (default x's): `[M, N]`.

    Args:
        x_MK: `[M, K]`, bf16 or fp16.
        weight_NK: `[N, K]`, likewise.
        bias_N: `[N]`, added in fp32 before rounding.
        leaves: 1, 2 or 4 parts of the contraction.
        in_tree: This rank's leaves are a part of a tree over several ranks: take the steps of the whole tree even for
            one leaf.
        dtype: Of the result: x's or fp32.
        programs: How many walk the tiles; None: one a multiprocessor. It changes no bit.
    """
    assert leaves in (1, 2, MAX_LEAVES)
    dtype = x_MK.dtype if dtype is None else dtype
    (num_rows, size), num_columns = x_MK.shape, len(weight_NK)
    leaf_size = size // leaves
    block_k = _step(leaf_size) if in_tree or leaves > 1 else 64
    # Rows that a descriptor can write are whole 16 bytes, too.
    y = torch.empty(num_rows, -(-num_columns // 8) * 8, dtype=dtype, device=x_MK.device)[:, :num_columns]
    tiles = cdiv(num_rows, BLOCK_M) * cdiv(num_columns, BLOCK_N)
    programs = min(num_multiprocessors(x_MK.device) if programs is None else programs, tiles)
    scratch = y.new_empty(programs, _PARTS if leaves > 1 else 0, 2, BLOCK_M, BLOCK_N // _PARTS, dtype=torch.float32)
    _matmul_kernel[(programs,)](
        _descriptor(_readable(x_MK), (BLOCK_M, block_k)),
        _descriptor(_readable(weight_NK), (BLOCK_N, block_k)),
        _descriptor(y, (BLOCK_M, BLOCK_N // _PARTS)),
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
    """`x` as a tensor descriptor can read it: dense rows that begin at multiples of 16 bytes (they mostly do)."""
    dense = x.stride(1) == 1 and x.stride(0) >= x.shape[1]  # rows that were expanded are one and the same
    readable = dense and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if readable else x.clone(memory_format=torch.contiguous_format)
