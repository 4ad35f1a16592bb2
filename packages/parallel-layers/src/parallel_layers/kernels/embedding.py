"""The gradient of an embedding table: the sum of the output gradients of each row's tokens, in a fixed order.

    dW[v] = Σ_{t: ids[t] = v} dy[t]         (fp32, in the order of the tokens)

The ids are sorted, so that a row's tokens are neighbours. The gradient is zeros first, and the kernels write the rows
of the ids that occur. A program sums `CHUNK` neighbours, so a frequent token keeps no program busy for long. Nothing
is added atomically: equal inputs give equal bits. Shape legend: T tokens, V rows, H hidden.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton, use_triton

CHUNK, MAX_BLOCK = 32, 1024


@triton.jit
def _write_row(target, total, mask, ADD: tl.constexpr):
    """Round `total [BLOCK]` once to the row at `target`; ADD: add the row's old value."""
    if ADD:
        total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, total.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _chunk_kernel(
    dy_ptr, ids_ptr, order_ptr, out_ptr, partial_ptr, tokens, rows, size,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Sum a chunk of the sorted tokens: write each row whose tokens all lie in it.

    `partial [2 x chunks, H]` gets the sums of a chunk's other rows: first of the row that began in an earlier chunk,
    then of the row that begins here and goes on in the next chunk.
    """
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    start = chunk * CHUNK
    stop = tl.minimum(start + CHUNK, tokens)
    row = tl.load(ids_ptr + start).to(tl.int64)
    if row < rows:  # the ids outside of the table are last
        begins = tl.load(ids_ptr + start - 1, mask=start > 0, other=-1) != row
        total = tl.zeros([BLOCK], tl.float32)
        ahead = tl.load(dy_ptr + tl.load(order_ptr + start) * size + column, mask=mask, other=0.0)
        for position in range(start, stop):
            # The next token's gradient is on its way while this one is added.
            has_next = position + 1 < stop
            total += ahead.to(tl.float32)
            token = tl.load(order_ptr + position + 1, mask=has_next, other=0)
            ahead = tl.load(dy_ptr + token * size + column, mask=mask & has_next, other=0.0)
            following = tl.load(ids_ptr + position + 1, mask=position + 1 < tokens, other=-1).to(tl.int64)
            ends = following != row
            if (ends | (position + 1 == stop)) & (row < rows):
                if ends & begins:
                    _write_row(out_ptr + row * size + column, total, mask, ADD)
                else:
                    tl.store(partial_ptr + (2 * chunk + begins.to(tl.int64)) * size + column, total, mask=mask)
                total = tl.zeros([BLOCK], tl.float32)
                begins = ends
            row = following


@triton.jit
def _border_kernel(
    ids_ptr, partial_ptr, out_ptr, tokens, rows, size, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """Write the row that begins in a chunk and goes on in the next, if there is one: the sum of its parts, in order."""
    chunk = tl.program_id(0).to(tl.int64)
    place = (chunk + 1) * CHUNK
    row = tl.load(ids_ptr + place - 1).to(tl.int64)
    begins = tl.load(ids_ptr + chunk * CHUNK - 1, mask=chunk > 0, other=-1) != row
    if begins & (row < rows) & (tl.load(ids_ptr + place) == row):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < size
        total = tl.load(partial_ptr + (2 * chunk + 1) * size + column, mask=mask, other=0.0)
        while tl.load(ids_ptr + place, mask=place < tokens, other=-1) == row:
            total += tl.load(partial_ptr + 2 * (place // CHUNK) * size + column, mask=mask, other=0.0)
            place += CHUNK
        _write_row(out_ptr + row * size + column, total, mask, ADD)


@on_its_device
def sum_by_id_(dy: Tensor, ids: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Write the sum of each row's tokens to the rows of `out [V, H]` that have any, or add it; dy is `[T, H]`.

    All tensors are contiguous.
    """
    (tokens, size), rows = dy.shape, len(out)
    ordered, order = torch.sort(ids.to(torch.int32), stable=True)  # half the passes that int64 needs
    block = min(MAX_BLOCK, next_power_of_2(size))
    chunks, blocks = cdiv(tokens, CHUNK), cdiv(size, block)
    partial = torch.empty(2 * chunks, size, dtype=torch.float32, device=dy.device)
    if dy.is_meta:  # a plan of memory: all is allocated
        return
    launch = {"CHUNK": CHUNK, "BLOCK": block, "ADD": add}
    _chunk_kernel[(chunks, blocks)](dy, ordered, order, out, partial, tokens, rows, size, **launch)
    if chunks > 1:
        _border_kernel[(chunks - 1, blocks)](ordered, partial, out, tokens, rows, size, **launch)


def zeros(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros `[rows, size]`, written as fp32: on a GPU torch writes 16-bit numbers at a lower rate."""
    words = torch.zeros(cdiv(rows * size * dtype.itemsize, 4), dtype=torch.float32, device=device)
    return words.view(dtype)[: rows * size].view(rows, size)


@torch.library.custom_op("parallel_layers::embedding_gradient", mutates_args=())
def embedding_gradient(dy: Tensor, ids: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient `[rows, H]` of a table from dy `[T, H]` and ids `[T]`; ids of `rows` or more are left out.

    The sums are fp32, rounded once to `dtype`.
    """
    dy, ids = dy.contiguous(), ids.contiguous()
    if dy.numel() and use_triton(dy):
        out = zeros(rows, dy.shape[-1], dtype, dy.device)
        sum_by_id_(dy, ids, out)
        return out
    inside = ids < rows
    sums = dy.new_zeros(rows, dy.shape[-1], dtype=torch.promote_types(dy.dtype, torch.float32))
    # Accumulating index_put_ sorts on a GPU, and adds in the order of the tokens on a CPU.
    return sums.index_put_((ids[inside],), dy[inside].to(sums.dtype), accumulate=True).to(dtype)


@embedding_gradient.register_fake
def _(dy: Tensor, ids: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    return dy.new_empty(rows, dy.shape[-1], dtype=dtype)


def add_embedding_gradient_(gradient: Tensor, dy: Tensor, ids: Tensor) -> None:
    """Add `embedding_gradient` to an earlier `gradient [V, H]`; the kernels touch only the rows of the ids."""
    if dy.numel() and use_triton(dy, gradient) and gradient.is_contiguous():
        sum_by_id_(dy.contiguous(), ids.contiguous(), gradient, add=True)
    else:
        gradient += embedding_gradient(dy, ids, len(gradient), gradient.dtype)
