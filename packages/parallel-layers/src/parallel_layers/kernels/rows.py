"""Copies of tokens to experts' rows, and sums of rows to tokens, in one pass over memory each.

Shape legend: T tokens, k rows of a token, M = T · k rows, H hidden.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, num_multiprocessors, on_its_device, tl, triton

_MIN_BLOCK, _MAX_BLOCK = 256, 4096


@triton.jit
def _copy_rows_kernel(x_ptr, places_ptr, rows_ptr, size, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    # Read once, written k times: reads in the order of rows would miss the cache.
    x = tl.load(x_ptr + token * size + column, mask=mask)
    for number in tl.static_range(K):
        row = tl.load(places_ptr + token * K + number)
        tl.store(rows_ptr + row * size + column, x, mask=mask)


@triton.jit
def _sum_rows_kernel(rows_ptr, places_ptr, y_ptr, size, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for number in tl.static_range(K):
        row = tl.load(places_ptr + token * K + number).to(tl.int64)
        total += tl.load(rows_ptr + row * size + column, mask=mask & (row >= 0), other=0.0).to(tl.float32)
    tl.store(y_ptr + token * size + column, total.to(y_ptr.dtype.element_ty), mask=mask)


@torch.library.custom_op("parallel_layers::copy_rows", mutates_args=())
def copy_rows(x_TH: Tensor, places_M: Tensor, top_k: int) -> Tensor:
    """Copy token t to rows `places[t k]` to `places[t k + k - 1]`, which are all rows: `[T, H]` -> `[M, H]`.

    No gradient.
    """
    rows = x_TH.new_empty(len(places_M), x_TH.shape[1])
    _launch(x_TH, _copy_rows_kernel, x_TH.contiguous(), places_M, rows, top_k)
    return rows


@copy_rows.register_fake
def _(x_TH: Tensor, places_M: Tensor, top_k: int) -> Tensor:
    return x_TH.new_empty(places_M.shape[0], x_TH.shape[1])


@torch.library.custom_op("parallel_layers::sum_rows", mutates_args=())
def sum_rows(rows_MH: Tensor, places_M: Tensor, top_k: int) -> Tensor:
    """Sum rows `places[t k]` to `places[t k + k - 1]` to token t, in fp32 and in order: `[M, H]` -> `[T, H]`.

    The result has the dtype of the rows. A place below 0 is left out. No gradient.
    """
    y = rows_MH.new_empty(len(places_M) // top_k, rows_MH.shape[1])
    _launch(y, _sum_rows_kernel, rows_MH.contiguous(), places_M, y, top_k)
    return y


@sum_rows.register_fake
def _(rows_MH: Tensor, places_M: Tensor, top_k: int) -> Tensor:
    return rows_MH.new_empty(places_M.shape[0] // top_k, rows_MH.shape[1])


@on_its_device
def _launch(of_tokens: Tensor, kernel: Any, source: Tensor, places: Tensor, target: Tensor, top_k: int) -> None:
    """Launch a kernel with one program for each token and block of its columns."""
    if of_tokens.numel():
        size = of_tokens.shape[1]
        block = min(_MAX_BLOCK, next_power_of_2(size))
        # Few tokens: more programs, so that each waits for fewer bytes.
        while block > _MIN_BLOCK and len(of_tokens) * cdiv(size, block) < 2 * num_multiprocessors(of_tokens.device):
            block //= 2
        warps = max(1, min(4, block // 256))
        kernel[(len(of_tokens), cdiv(size, block))](source, places, target, size, K=top_k, BLOCK=block, num_warps=warps)
