"""The gradients of Mamba-2's recurrence in chunks; the states before the chunks are computed again.

With the names of `state_space`, the products P_ij = (C_i · B_j) exp(c_i - c_j) for j <= i, N = dt x, and the gradients
O of the outputs, X of a state before and Y of one behind a chunk:

    R_ij = (O_i · N_j) exp(c_i - c_j)            Ŷ_i = exp(c_C - c_i) Yᵀ B_i         X̂_i = exp(c_i) Xᵀ C_i
    dN = Pᵀ O + Ŷ                                dx = dt dN + skip O                 d(dt) = dN · x
    dC = R B + exp(c) O Xᵀ                       dB = Rᵀ C + exp(c_C - c) N Yᵀ       (X the state, Y its gradient)

Each decay is in the products of the rows from its token on with the columns before it, in what these rows read of the
state before, in what these columns leave in the state behind, and between the two states. R is summed over the heads of
a program before its products with B and C.

Shape legend: as `state_space`; b blocks of heads that lie in one group.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import Kernel, cdiv, on_its_device, tl
from parallel_layers.kernels.state_space import (
    Tiles,
    chunks_of,
    contiguous,
    factors_of,
    load_rows,
    load_state,
    parts_of,
    precision_of,
    products_of,
    products_with_state,
    rows_of,
    states_of,
)

BACKWARD = {
    torch.bfloat16: Tiles(size=64, state=(64, 64), part=(64, 128), heads=16, warps=(4, 4), stages=(2, 1)),
    torch.float32: Tiles(size=32, state=(32, 32), part=(32, 32), heads=4, warps=(4, 4), stages=(2, 1)),
}


@Kernel
def _values_kernel(
    x_ptr, b_ptr, c_ptr, sums_ptr, steps_ptr, skip_ptr, chunks_ptr, states_ptr, d_states_ptr, between_ptr, d_out_ptr,
    d_x_ptr, d_steps_ptr, d_decays_ptr, d_skip_ptr, d_products_ptr,
    x_stride, b_stride, c_stride, d_out_stride, num_tokens, heads, group,
    SIZE: tl.constexpr, DIM: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x, of the steps and decays, of the skip by chunk, and R summed over the heads."""
    blocks = heads // HEADS
    chunk, first_head = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * HEADS
    start, length = tl.load(chunks_ptr + 2 * chunk).to(tl.int64), tl.load(chunks_ptr + 2 * chunk + 1)
    if length == 0:
        if skip_ptr is not None:
            for number in range(HEADS):
                tl.store(d_skip_ptr + chunk * heads + first_head + number, 0.0)
        return
    rows = tl.arange(0, SIZE)
    inside, token = rows < length, start + rows
    b_ptr += first_head // group * DIM
    c_ptr += first_head // group * DIM
    products, diagonal, b, c = products_of(
        b_ptr, c_ptr, b_stride, c_stride, token, inside, SIZE, DIM, COLUMNS, PRECISION
    )
    sum_of_heads = tl.zeros((SIZE, SIZE), tl.float32)
    for number in range(HEADS):
        head = first_head + number
        at = head.to(tl.int64) * num_tokens + token
        sums = tl.load(sums_ptr + at, mask=inside, other=0.0)
        steps = tl.load(steps_ptr + at, mask=inside, other=0.0)
        total = tl.load(sums_ptr + head.to(tl.int64) * num_tokens + start + length - 1)
        growth, to_end = tl.exp(sums.to(tl.float32)), tl.exp((total - sums).to(tl.float32))
        factors = factors_of(sums)
        weights = (products * factors).to(x_ptr.dtype.element_ty)
        state_at = (chunk * heads + head) * (DIM * HEAD_DIM)
        d_products = tl.zeros((SIZE, SIZE), tl.float32)
        d_steps, read = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
        written = tl.zeros((SIZE,), tl.float32)
        d_skip = 0.0
        for row_block in range(0, HEAD_DIM, ROWS):
            row = row_block + tl.arange(0, ROWS)
            x = load_rows(x_ptr + head * HEAD_DIM, x_stride, token, inside, row, HEAD_DIM)
            d_out = load_rows(d_out_ptr + head * HEAD_DIM, d_out_stride, token, inside, row, HEAD_DIM)
            from_state = products_with_state(
                c, c_ptr, c_stride, token, inside, states_ptr + state_at, row, DIM, HEAD_DIM, COLUMNS, PRECISION
            )
            read += growth * tl.sum(d_out * from_state, 1)
            to_state = to_end[:, None] * products_with_state(
                b, b_ptr, b_stride, token, inside, d_states_ptr + state_at, row, DIM, HEAD_DIM, COLUMNS, PRECISION
            )
            written += steps * tl.sum(x * to_state, 1)
            d_values = tl.dot(tl.trans(weights), d_out, to_state, input_precision=PRECISION) + diagonal[:, None] * d_out
            d_products = tl.dot(d_out, tl.trans(x), d_products, input_precision=PRECISION)
            d_steps += tl.sum(x * d_values, 1)
            d_x = steps[:, None] * d_values
            if skip_ptr is not None:
                d_x += tl.load(skip_ptr + head).to(tl.float32) * d_out
                d_skip += tl.sum(tl.sum(x.to(tl.float32) * d_out.to(tl.float32), 1), 0)
            target = d_x_ptr + (token[:, None] * heads + head) * HEAD_DIM + row[None, :]
            tl.store(target, d_x.to(d_x_ptr.dtype.element_ty), mask=inside[:, None] & (row < HEAD_DIM)[None, :])
        d_products *= factors * steps[None, :]
        sum_of_heads += d_products
        pairs = d_products * products
        read += tl.sum(pairs, 1) - tl.sum(pairs, 0)
        # In fp64, because what a token writes itself can be much larger than the sum of those before.
        wide = written.to(tl.float64)
        d_decays = tl.cumsum(read, 0, reverse=True) + (tl.cumsum(wide, 0) - wide).to(tl.float32)
        d_decays += tl.exp(total.to(tl.float32)) * tl.load(between_ptr + chunk * heads + head)
        by_token = token * heads + head
        tl.store(d_decays_ptr + by_token, d_decays, mask=inside)
        tl.store(d_steps_ptr + by_token, d_steps, mask=inside)
        if skip_ptr is not None:
            tl.store(d_skip_ptr + chunk * heads + head, d_skip)
    at = (tl.program_id(0).to(tl.int64) * SIZE + rows[:, None]) * SIZE + rows[None, :]
    sum_of_heads = tl.where(rows[:, None] >= rows[None, :], sum_of_heads, 0.0)
    tl.store(d_products_ptr + at, sum_of_heads.to(d_products_ptr.dtype.element_ty))


@Kernel
def _keys_kernel(
    x_ptr, b_ptr, sums_ptr, steps_ptr, chunks_ptr, states_ptr, d_products_ptr, d_c_ptr,
    x_stride, b_stride, num_tokens, heads, group,
    SIZE: tl.constexpr, DIM: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of C from gradients of outputs for x, B, and states; with `KEYS` that of B from x, C, and
    gradients of states."""
    blocks = heads // HEADS
    chunk, first_head = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * HEADS
    start, length = tl.load(chunks_ptr + 2 * chunk).to(tl.int64), tl.load(chunks_ptr + 2 * chunk + 1)
    if length == 0:
        return
    rows, column = tl.arange(0, SIZE), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, token = rows < length, start + rows
    total_sum = tl.zeros((SIZE, COLUMNS), tl.float32)
    for number in range(HEADS):
        head = first_head + number
        at = head.to(tl.int64) * num_tokens
        sums = tl.load(sums_ptr + at + token, mask=inside, other=0.0)
        if KEYS:
            total = tl.load(sums_ptr + at + start + length - 1)
            weights = tl.exp((total - sums).to(tl.float32)) * tl.load(steps_ptr + at + token, mask=inside, other=0.0)
        else:
            weights = tl.exp(sums.to(tl.float32))
        for row_block in tl.static_range(0, HEAD_DIM, ROWS):
            row = row_block + tl.arange(0, ROWS)
            x = load_rows(x_ptr + head * HEAD_DIM, x_stride, token, inside, row, HEAD_DIM)
            state_ptr = states_ptr + (chunk * heads + head) * (DIM * HEAD_DIM)
            state = load_state(state_ptr, row[:, None], column[None, :], HEAD_DIM, DIM)
            weighted = (x * weights[:, None]).to(state.dtype)
            total_sum = tl.dot(weighted, state, total_sum, input_precision=PRECISION)
    b = load_rows(b_ptr + first_head // group * DIM, b_stride, token, inside, column, DIM)
    at = (tl.program_id(0).to(tl.int64) * SIZE + rows[:, None]) * SIZE + rows[None, :]
    d_products = tl.load(d_products_ptr + at)
    if KEYS:
        d_products = tl.trans(d_products)
    total_sum = tl.dot(d_products, b, total_sum, input_precision=PRECISION)
    target = d_c_ptr + (token[:, None] * blocks + first_head // HEADS) * DIM + column[None, :]
    tl.store(target, total_sum.to(d_c_ptr.dtype.element_ty), mask=inside[:, None] & (column < DIM)[None, :])


@on_its_device
def backward(
    d_out: Tensor, d_end: Tensor | None, x: Tensor, steps: Tensor, log_decay: Tensor, b: Tensor, c: Tensor,
    skip: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor, gradients: Sequence[Tensor], slices: int,
) -> None:  # fmt: skip
    """Write the gradients of x, the steps, the log decays, B, C, the skip and the initial states.

    The last two are empty where the tensor is None.
    """
    tiles, (d_x, d_steps, d_decay, d_b, d_c, d_skip, d_initial) = BACKWARD[x.dtype], gradients
    x, b, c, d_out = (rows_of(tensor) for tensor in (x, b, c, d_out))
    (tokens, heads, head_dim), (_, groups, dim) = x.shape, b.shape
    chunks = chunks_of(x, steps, log_decay, cu_seqlens, tiles.size)
    num_chunks, start = len(chunks.starts), contiguous(initial_state)
    states, d_states = (x.new_empty(num_chunks, heads, head_dim, dim) for _ in range(2))
    d_start = None if initial_state is None else d_initial
    states_of(d_out, c, chunks, tiles, contiguous(d_end), d_states, d_start, slices=slices, reverse=True)
    between = states_of(x, b, chunks, tiles, start, states, None, d_states=d_states, slices=slices)

    block = gcd(heads // groups, tiles.heads)
    blocks = heads // block
    skips = None if skip is None else steps.new_empty(num_chunks, heads)
    d_products = x.new_empty(num_chunks, blocks, chunks.size, chunks.size)
    rows, columns = parts_of(tiles.part, head_dim, dim)
    sizes = {
        "SIZE": chunks.size, "DIM": dim, "HEAD_DIM": head_dim, "ROWS": rows, "COLUMNS": columns, "HEADS": block,
        "PRECISION": precision_of(x),
    }  # fmt: skip
    _values_kernel[(num_chunks * blocks,)](
        x, b, c, chunks.sums, chunks.steps, skip, chunks.starts, states, d_states, between, d_out,
        d_x, d_steps, d_decay, skips, d_products,
        x.stride(0), b.stride(0), c.stride(0), d_out.stride(0), tokens, heads, heads // groups, **sizes,
        num_warps=tiles.warps[1], num_stages=tiles.stages[1],
    )  # fmt: skip
    if skips is not None:
        d_skip.copy_(skips.sum(0))
    for tensor, keys, of_states, is_key, d_keys in ((x, c, d_states, True, d_b), (d_out, b, states, False, d_c)):
        parts = d_keys if blocks == groups else steps.new_empty(tokens, blocks, dim)
        _keys_kernel[(num_chunks * blocks, cdiv(dim, columns))](
            tensor, keys, chunks.sums, chunks.steps, chunks.starts, of_states, d_products, parts,
            tensor.stride(0), keys.stride(0), tokens, heads, heads // groups, KEYS=is_key, **sizes,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        if blocks != groups:
            d_keys.copy_(parts.view(tokens, groups, -1, dim).sum(2))


@on_its_device
def gradients_before_slices(
    d_out: Tensor, steps: Tensor, log_decay: Tensor, c: Tensor, cu_seqlens: Tensor, gradients: Tensor
) -> None:
    """Write the gradients of the states before the slices by the slices' own outputs, `[slices, V, D, E]`."""
    tiles = BACKWARD[d_out.dtype]
    d_out, c = rows_of(d_out), rows_of(c)
    chunks = chunks_of(d_out, steps, log_decay, cu_seqlens, tiles.size)
    states_of(d_out, c, chunks, tiles, None, None, gradients, slices=len(gradients), reverse=True)
