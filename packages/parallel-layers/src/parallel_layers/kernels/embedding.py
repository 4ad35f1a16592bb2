"""The gradient of an embedding table: the sum of the output gradients of each row's tokens, in a fixed order.

    dW[v] = Σ_{t: ids[t] = v} dy[t]         (fp32, in the order of the tokens)

The ids are sorted, so that a row's tokens are neighbours. One kernel writes every row of dW once, also those of zeros.
A frequent token would keep one program busy alone: chunks of `CHUNK` neighbours of one id are summed before, side by
side. Nothing is added atomically: equal inputs give equal bits. Shape legend: T tokens, V rows, H hidden.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton, use_triton

CHUNK, ROWS, MAX_BLOCK = 32, 8, 1024


@triton.jit
def _sum_rows(dy_ptr, order_ptr, start, stop, size, column, mask, total, ORDERED: tl.constexpr):
    """Return `total [BLOCK]` and the rows `start` to `stop - 1` of dy, of `order` if ORDERED, added one by one."""
    for place in range(start, stop):
        row = tl.load(order_ptr + place) if ORDERED else place
        total += tl.load(dy_ptr + row * size + column, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _chunk_kernel(dy_ptr, ids_ptr, order_ptr, partial_ptr, size, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Sum each whole chunk of sorted tokens that have one id."""
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * CHUNK
    if tl.load(ids_ptr + start) == tl.load(ids_ptr + start + CHUNK - 1):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < size
        total = tl.zeros([BLOCK], tl.float32)
        total = _sum_rows(dy_ptr, order_ptr, start, start + CHUNK, size, column, mask, total, True)
        tl.store(partial_ptr + chunk * size + column, total, mask=mask)


@triton.jit
def _row_kernel(
    dy_ptr, order_ptr, partial_ptr, starts_ptr, out_ptr, rows, size,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write rows of the gradient: the tokens before the first whole chunk, the whole chunks, the tokens after them."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    for row in range(first, tl.minimum(first + ROWS, rows)):
        start, stop = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
        total = tl.zeros([BLOCK], tl.float32)
        if stop > start:
            whole, end = (start + CHUNK - 1) // CHUNK, stop // CHUNK
            head = tl.minimum(whole * CHUNK, stop)
            total = _sum_rows(dy_ptr, order_ptr, start, head, size, column, mask, total, True)
            total = _sum_rows(partial_ptr, order_ptr, whole, end, size, column, mask, total, False)
            total = _sum_rows(dy_ptr, order_ptr, tl.maximum(end * CHUNK, head), stop, size, column, mask, total, True)
        tl.store(out_ptr + row * size + column, total.to(out_ptr.dtype.element_ty), mask=mask)


@on_its_device
def sum_by_id_(dy: Tensor, ids: Tensor, out: Tensor) -> None:
    """Write the sum of each row's tokens to `out [V, H]` by the kernels; dy is `[T, H]`, contiguous, and ids `[T]`."""
    rows, size = out.shape
    ordered, order = torch.sort(ids, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(rows + 1, device=ids.device))
    block = min(MAX_BLOCK, next_power_of_2(size))
    blocks = cdiv(size, block)
    chunks = len(ids) // CHUNK
    partial = torch.empty(chunks, size, dtype=torch.float32, device=dy.device)
    if chunks:
        _chunk_kernel[(chunks, blocks)](dy, ordered, order, partial, size, CHUNK=CHUNK, BLOCK=block)
    _row_kernel[(cdiv(rows, ROWS), blocks)](
        dy, order, partial, starts, out, rows, size, CHUNK=CHUNK, ROWS=ROWS, BLOCK=block
    )


@torch.library.custom_op("parallel_layers::embedding_gradient", mutates_args=())
def embedding_gradient(dy: Tensor, ids: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient `[rows, H]` of a table from dy `[T, H]` and ids `[T]`; ids of `rows` or more are left out.

    The sums are fp32, rounded once to `dtype`.
    """
    dy, ids = dy.contiguous(), ids.contiguous()
    if dy.numel() and use_triton(dy):
        out = dy.new_empty(rows, dy.shape[-1], dtype=dtype)
        sum_by_id_(dy, ids, out)
        return out
    inside = ids < rows
    sums = dy.new_zeros(rows, dy.shape[-1], dtype=torch.promote_types(dy.dtype, torch.float32))
    # Accumulating index_put_ sorts on a GPU, and adds in the order of the tokens on a CPU.
    return sums.index_put_((ids[inside],), dy[inside].to(sums.dtype), accumulate=True).to(dtype)


@embedding_gradient.register_fake
def _(dy: Tensor, ids: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    return dy.new_empty(rows, dy.shape[-1], dtype=dtype)
