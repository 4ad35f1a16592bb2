"""Copies of tokens to experts' rows, and sums of rows to tokens, in one pass over memory each.

Shape legend: T tokens, k rows of a token, M = T · k rows, H hidden.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton

_MAX_BLOCK = 4096


@triton.jit
def _gather_rows_kernel(x_ptr, order_ptr, y_ptr, size, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(order_ptr + row) // K
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    tl.store(y_ptr + row * size + column, tl.load(x_ptr + token * size + column, mask=mask), mask=mask)


@triton.jit
def _sum_rows_kernel(rows_ptr, places_ptr, y_ptr, size, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for number in tl.static_range(K):
        row = tl.load(places_ptr + token * K + number)
        total += tl.load(rows_ptr + row * size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * size + column, total.to(y_ptr.dtype.element_ty), mask=mask)


@torch.library.custom_op("parallel_layers::gather_rows", mutates_args=())
def gather_rows(x_TH: Tensor, order_M: Tensor, top_k: int) -> Tensor:
    """Copy token `order[i] // top_k` to row i: `[T, H]` -> `[M, H]`. No gradient."""
    rows = x_TH.new_empty(len(order_M), x_TH.shape[1])
    _launch(rows, _gather_rows_kernel, x_TH.contiguous(), order_M, top_k)
    return rows


@gather_rows.register_fake
def _(x_TH: Tensor, order_M: Tensor, top_k: int) -> Tensor:
    return x_TH.new_empty(order_M.shape[0], x_TH.shape[1])


@torch.library.custom_op("parallel_layers::sum_rows", mutates_args=())
def sum_rows(rows_MH: Tensor, places_M: Tensor, top_k: int) -> Tensor:
    """Sum rows `places[t k]` to `places[t k + k - 1]` to token t, in fp32 and in order: `[M, H]` -> `[T, H]`.

    The result has the dtype of the rows. No gradient.
    """
    y = rows_MH.new_empty(len(places_M) // top_k, rows_MH.shape[1])
    _launch(y, _sum_rows_kernel, rows_MH.contiguous(), places_M, top_k)
    return y


@sum_rows.register_fake
def _(rows_MH: Tensor, places_M: Tensor, top_k: int) -> Tensor:
    return rows_MH.new_empty(places_M.shape[0] // top_k, rows_MH.shape[1])


@on_its_device
def _launch(y: Tensor, kernel: Any, x: Tensor, index: Tensor, top_k: int) -> None:
    """Launch a kernel with one program for each row of `y` and block of its columns."""
    if y.numel():
        block = min(_MAX_BLOCK, next_power_of_2(y.shape[1]))
        kernel[(len(y), cdiv(y.shape[1], block))](x, index, y, y.shape[1], K=top_k, BLOCK=block, num_warps=4)
