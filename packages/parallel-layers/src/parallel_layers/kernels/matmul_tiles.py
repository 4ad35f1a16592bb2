"""`kernels.matmul` for few rows, and for rows in groups that have weights of their own: the same bits of each element.

Both kernels sum an element in the same steps of the contraction, and add leaves in the same tree. Here a program
computes one small tile, so few rows occupy all multiprocessors; with few rows each leaf has a program of its own.

Shape suffixes: M rows, N columns of the result, K contraction, e groups.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor

from parallel_layers.kernels.head_triton import descriptor
from parallel_layers.kernels.runtime import cdiv, on_its_device, tl, triton

MOST_ROWS = 256
"""The rows up to which small tiles serve a product with one weight."""


@triton.jit
def _leaf(
    x, weight, row, column, group, leaf, num_columns, size, steps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, INPUT_MAJOR: tl.constexpr,
):  # fmt: skip
    """Return the sum over a leaf of the contraction `[BM, BN]`; the descriptors hold all groups below each other."""
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(steps):
        k = (leaf * steps + step) * BK
        a = x.load([row, k])
        if INPUT_MAJOR:
            total = tl.dot(a, weight.load([group * size + k, column]), total)
        else:
            total = tl.dot(a, weight.load([group * num_columns + column, k]).T, total)
    return total


# Without specialisation a leaf of one step stays a loop, as in `kernels.matmul`.
@triton.jit(do_not_specialize=["steps"])
def _tiles_kernel(
    x, weight, y_ptr, bias_ptr, groups_ptr, rows_ptr, ends_ptr, num_rows, num_columns, size, steps,
    LEAVES: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    INPUT_MAJOR: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y `[M, N]`; with SPLIT one leaf of it, to `y [LEAVES, M, N]`."""
    if groups_ptr is None:
        # Neighbouring programs share columns: the weight is read from memory once.
        tiles_m = tl.cdiv(num_rows, BM)
        group, row, end = 0, tl.program_id(0) % tiles_m * BM, num_rows
        column = tl.program_id(0) // tiles_m * BN
    else:
        tiles_n = tl.cdiv(num_columns, BN)
        tile, column = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n * BN
        group, row, end = tl.load(groups_ptr + tile), tl.load(rows_ptr + tile), tl.load(ends_ptr + tile)
    if row >= end:
        return
    if SPLIT:
        leaf = tl.program_id(1)
        total = _leaf(x, weight, row, column, group, leaf, num_columns, size, steps, BM, BN, BK, INPUT_MAJOR)
        y_ptr += leaf.to(tl.int64) * num_rows * num_columns
    else:
        total = _leaf(x, weight, row, column, group, 0, num_columns, size, steps, BM, BN, BK, INPUT_MAJOR)
        if LEAVES > 1:
            total += _leaf(x, weight, row, column, group, 1, num_columns, size, steps, BM, BN, BK, INPUT_MAJOR)
        if LEAVES > 2:
            right = _leaf(x, weight, row, column, group, 2, num_columns, size, steps, BM, BN, BK, INPUT_MAJOR)
            right += _leaf(x, weight, row, column, group, 3, num_columns, size, steps, BM, BN, BK, INPUT_MAJOR)
            total += right
    rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :], total.to(y_ptr.dtype.element_ty),
        mask=(rows < end)[:, None] & (columns < num_columns)[None, :],
    )  # fmt: skip


@triton.jit
def _tree_kernel(parts_ptr, y_ptr, bias_ptr, numel, num_columns, LEAVES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.load(parts_ptr + at, mask=inside, other=0.0) + tl.load(parts_ptr + numel + at, mask=inside, other=0.0)
    if LEAVES > 2:
        right = tl.load(parts_ptr + 2 * numel + at, mask=inside, other=0.0)
        total += right + tl.load(parts_ptr + 3 * numel + at, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at % num_columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)


@on_its_device
def few_rows_matmul(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, leaves: int, block_k: int, dtype: torch.dtype
) -> Tensor:
    """Return `matmul.invariant_matmul` of at most `MOST_ROWS` rows; operands must suit tensor descriptors."""
    (num_rows, size), num_columns = x_MK.shape, len(weight_NK)
    block_n = 128 if num_columns >= 16384 else 64 if num_columns >= 8192 else 32
    tiles = cdiv(num_rows, 64) * cdiv(num_columns, block_n)
    y = x_MK.new_empty(num_rows, num_columns, dtype=dtype)
    split = leaves > 1
    parts = y.new_empty(leaves, *y.shape, dtype=torch.float32) if split else y
    bias = None if bias_N is None else bias_N.contiguous()
    _tiles_kernel[(tiles, leaves if split else 1)](
        descriptor(x_MK, (64, block_k)), descriptor(weight_NK, (block_n, block_k)), parts, None if split else bias,
        None, None, None, num_rows, num_columns, size, cdiv(size // leaves, block_k),
        LEAVES=leaves, SPLIT=split, BM=64, BN=block_n, BK=block_k, INPUT_MAJOR=False, num_warps=4, num_stages=5,
    )  # fmt: skip
    if split:
        _tree_kernel[(cdiv(y.numel(), 1024),)](parts, y, bias, y.numel(), num_columns, LEAVES=leaves, BLOCK=1024)
    return y


@on_its_device
def grouped_matmul(
    x_MK: Tensor, weight_eNK: Tensor, counts_e: Tensor, *, leaves: int, block_k: int, dtype: torch.dtype
) -> Tensor:
    """Return each run of `counts_e` rows times the transposed weight of its group `[M, N]`, without the host.

    Args:
        x_MK: `[M, K]`, bf16 or fp16, whose rows are in the order of groups.
        weight_eNK: `[e, N, K]`, dense, or the transpose of a dense `[e, K, N]`.
        counts_e: `[e]` int64, with the sum M.
        leaves: Parts of the contraction: 1, 2 or 4, added as a tree.
        block_k: The step of the contraction, as in `invariant_matmul`.
        dtype: The dtype of the result.
    """
    (num_rows, size), (groups, num_columns, _) = x_MK.shape, weight_eNK.shape
    rows_of_tile = 64 if num_rows <= 64 * groups else 128
    tiles = -(-counts_e // rows_of_tile)
    ends, row_ends = tiles.cumsum(0), counts_e.cumsum(0)
    numbers = torch.arange(cdiv(num_rows, rows_of_tile) + groups, device=x_MK.device)
    group = torch.searchsorted(ends, numbers, right=True)
    is_tile, group = group < groups, group.clamp(max=groups - 1)
    rows = (row_ends - counts_e)[group] + (numbers - (ends - tiles)[group]) * rows_of_tile
    last = torch.where(is_tile, row_ends[group], 0)
    input_major = weight_eNK.stride(2) != 1
    stored = weight_eNK.transpose(1, 2) if input_major else weight_eNK
    block = (block_k, 128) if input_major else (128, block_k)
    y = x_MK.new_empty(num_rows, num_columns, dtype=dtype)
    _tiles_kernel[(len(numbers) * cdiv(num_columns, 128),)](
        descriptor(x_MK, (rows_of_tile, block_k)), descriptor(stored.contiguous().flatten(0, 1), block), y, None,
        group.int(), rows.int(), last.int(), num_rows, num_columns, size, cdiv(size // leaves, block_k),
        LEAVES=leaves, SPLIT=False, BM=rows_of_tile, BN=128, BK=block_k, INPUT_MAJOR=input_major,
        num_warps=rows_of_tile // 16, num_stages=4,
    )  # fmt: skip
    return y
