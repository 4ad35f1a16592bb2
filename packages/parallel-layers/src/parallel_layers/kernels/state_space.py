"""Mamba-2's recurrence over packed sequences in chunks: the states before the chunks, and the outputs.

https://arxiv.org/abs/2405.21060, section 6. For a head with the sums c_i of dt A up to token i of a chunk, the state X
`[D, E]` before the chunk and the state Y behind it:

    o_i = exp(c_i) Xᵀ C_i + Σ_{j <= i} (C_i · B_j) exp(c_i - c_j) dt_j x_j + skip x_i
    Y = exp(c_C) X + Σ_j exp(c_C - c_j) dt_j B_j x_jᵀ

One kernel finds the chunks and sums the decays, the second walks the chunks of each sequence and keeps the state in
registers, the third computes the outputs of all chunks, some heads of a group in a program, which share C Bᵀ. In memory
states lie transposed, `[E, D]`, in the dtype of x.

Shape legend: T tokens, N sequences, M chunks of C tokens, V heads of size E in G groups, D state size.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import Kernel, cdiv, next_power_of_2, on_its_device, tl, triton


class Tiles(NamedTuple):
    """The sizes of a program's work.

    Attributes:
        size: C, the tokens of a chunk.
        state: The most rows and columns of a state in a program that walks chunks.
        part: The most rows and columns of a state in a GEMM of a program that computes outputs or gradients.
        heads: The most heads of a group that share C Bᵀ.
        warps, stages: Of the programs that walk, and of those that compute outputs or gradients.
    """

    size: int
    state: tuple[int, int]
    part: tuple[int, int]
    heads: int
    warps: tuple[int, int]
    stages: tuple[int, int]


FORWARD = {
    torch.bfloat16: Tiles(size=64, state=(64, 64), part=(64, 128), heads=8, warps=(4, 4), stages=(3, 1)),
    torch.float32: Tiles(size=64, state=(32, 32), part=(32, 32), heads=1, warps=(4, 4), stages=(2, 1)),
}

_LEAST_SIZE = 16


@Kernel
def _chunks_kernel(
    cu_ptr, steps_ptr, decays_ptr, chunks_ptr, first_ptr, sums_ptr, head_steps_ptr, num_sequences, num_tokens, heads,
    SIZE: tl.constexpr, SEQUENCES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    sequence, chunks_before, total = 0, 0, 0
    for block in range(0, num_sequences, SEQUENCES):
        n = block + tl.arange(0, SEQUENCES)
        inside = n < num_sequences
        lengths = tl.load(cu_ptr + n + 1, mask=inside, other=0) - tl.load(cu_ptr + n, mask=inside, other=0)
        counts = (lengths + SIZE - 1) // SIZE
        is_before = (total + tl.cumsum(counts, 0) <= chunk) & inside
        sequence += tl.sum(is_before.to(tl.int32), 0)
        chunks_before += tl.sum(tl.where(is_before, counts, 0), 0)
        total += tl.sum(counts, 0)
    is_spare = sequence == num_sequences
    sequence = tl.minimum(sequence, num_sequences - 1)
    number = chunk - chunks_before
    start = tl.load(cu_ptr + sequence) + number * SIZE
    length = tl.where(is_spare, 0, tl.minimum(tl.load(cu_ptr + sequence + 1) - start, SIZE))
    if tl.program_id(1) == 0:
        tl.store(chunks_ptr + 2 * chunk, start)
        tl.store(chunks_ptr + 2 * chunk + 1, length)
        if (number == 0) & (length > 0):
            tl.store(first_ptr + sequence, chunk)

    rows, head = tl.arange(0, SIZE), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    token = (start + rows).to(tl.int64)
    mask = (rows < length)[:, None] & (head < heads)[None, :]
    by_token, by_head = token[:, None] * heads + head[None, :], head[None, :].to(tl.int64) * num_tokens + token[:, None]
    decays = tl.load(decays_ptr + by_token, mask=mask, other=0.0).to(sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + by_head, tl.cumsum(decays, 0), mask=mask)
    tl.store(head_steps_ptr + by_head, tl.load(steps_ptr + by_token, mask=mask, other=0.0), mask=mask)


@triton.jit
def load_rows(ptr, stride, token, inside, column, WIDTH: tl.constexpr):
    """Load rows of tokens, `[C, columns]`; 0 where a token is not inside, or a column beyond `WIDTH`."""
    mask = inside[:, None] & (column < WIDTH)[None, :]
    return tl.load(ptr + token[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_state(ptr, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a part of a transposed state `[E, D]`; `row` and `column` have two dims, the result their common shape."""
    return tl.load(ptr + row * COLUMNS + column, mask=(row < ROWS) & (column < COLUMNS), other=0.0)


@triton.jit
def products_of(
    b_ptr, c_ptr, b_stride, c_stride, token, inside, SIZE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return C Bᵀ below the diagonal `[C, C]` and on the diagonal `[C]`, and the last columns of B and C."""
    products = tl.zeros((SIZE, SIZE), tl.float32)
    for block in tl.static_range(0, DIM, COLUMNS):
        column = block + tl.arange(0, COLUMNS)
        b = load_rows(b_ptr, b_stride, token, inside, column, DIM)
        c = load_rows(c_ptr, c_stride, token, inside, column, DIM)
        products = tl.dot(c, tl.trans(b), products, input_precision=PRECISION)
    rows = tl.arange(0, SIZE)
    diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], products, 0.0), 1)
    return tl.where(rows[:, None] > rows[None, :], products, 0.0), diagonal, b, c


@triton.jit
def products_with_state(
    b, b_ptr, b_stride, token, inside, state_ptr, row, DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return B S `[C, rows]` for these rows of a transposed state S; `b` is B where a program holds all its columns.

    The loops over the parts of a state are not unrolled: many copies of a body with tf32x3 would compile for minutes.
    """
    out = tl.zeros((token.shape[0], row.shape[0]), tl.float32)
    for block in range(0, DIM, COLUMNS):
        column = block + tl.arange(0, COLUMNS)
        columns_of_b = load_rows(b_ptr, b_stride, token, inside, column, DIM) if COLUMNS < DIM else b
        state = load_state(state_ptr, row[None, :], column[:, None], HEAD_DIM, DIM)
        out = tl.dot(columns_of_b, state, out, input_precision=PRECISION)
    return out


@triton.jit
def factors_of(sums):
    """Return exp(c_i - c_j) `[C, C]`, at most 1 also where j > i."""
    return tl.exp(tl.minimum((sums[:, None] - sums[None, :]).to(tl.float32), 0.0))


@Kernel
def _states_kernel(
    x_ptr, b_ptr, sums_ptr, steps_ptr, cu_ptr, first_ptr, start_ptr, states_ptr, end_ptr, d_states_ptr, products_ptr,
    x_stride, b_stride, num_tokens, heads, group, per_slice, num_chunks,
    SIZE: tl.constexpr, DIM: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk the chunks of a sequence, from the last one with `REVERSE`; see `states_of`.

    `products_ptr`: for each part of a state the scalar product with that of `d_states_ptr`, `[parts, M, V]`.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tiles: tl.constexpr = tl.cdiv(DIM, COLUMNS)
    row = tl.program_id(2) // tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < HEAD_DIM)[:, None] & (column < DIM)[None, :]
    begin, end = tl.load(cu_ptr + sequence).to(tl.int64), tl.load(cu_ptr + sequence + 1).to(tl.int64)
    count = ((end - begin + SIZE - 1) // SIZE).to(tl.int32)
    part = sequence // per_slice
    is_first = begin == tl.load(cu_ptr + part * per_slice)
    is_last = end == tl.load(cu_ptr + (part + 1) * per_slice)
    if REVERSE:
        is_first, is_last = is_last, is_first
    # An empty sequence of a slice is not its first or last; without slices each sequence has a state.
    has_state = (count > 0) | (per_slice == 1)
    outside = (part * heads + head) * DIM * HEAD_DIM + column[None, :] * HEAD_DIM + row[:, None]
    state = tl.zeros((ROWS, COLUMNS), tl.float32)
    if start_ptr is not None:
        state += tl.load(start_ptr + outside, mask=mask & is_first & has_state, other=0.0)

    rows = tl.arange(0, SIZE)
    x_ptr += head * HEAD_DIM
    b_ptr += head // group * DIM
    sums_ptr += head.to(tl.int64) * num_tokens
    steps_ptr += head.to(tl.int64) * num_tokens
    first = tl.load(first_ptr + sequence, mask=count > 0, other=0).to(tl.int64)
    for step in range(count):
        chunk = count - 1 - step if REVERSE else step
        at = (first + chunk) * heads + head
        inner = at * (DIM * HEAD_DIM) + row[:, None] * DIM + column[None, :]
        if states_ptr is not None:
            tl.store(states_ptr + inner, state.to(states_ptr.dtype.element_ty), mask=mask)
        if products_ptr is not None:
            product = tl.sum(tl.sum(state * tl.load(d_states_ptr + inner, mask=mask, other=0.0), 1), 0)
            tl.store(products_ptr + tl.program_id(2).to(tl.int64) * num_chunks * heads + at, product)
        token = begin + chunk * SIZE + rows
        inside = token < end
        x = load_rows(x_ptr, x_stride, token, inside, row, HEAD_DIM)
        b = load_rows(b_ptr, b_stride, token, inside, column, DIM)
        sums = tl.load(sums_ptr + token, mask=inside, other=0.0)
        total = tl.load(sums_ptr + tl.minimum(begin + (chunk + 1) * SIZE, end) - 1)
        if REVERSE:
            weights = tl.exp(sums.to(tl.float32))
        else:
            weights = tl.exp((total - sums).to(tl.float32)) * tl.load(steps_ptr + token, mask=inside, other=0.0)
        weighted = (x * weights[:, None]).to(b.dtype)
        state = tl.dot(tl.trans(weighted), b, state * tl.exp(total.to(tl.float32)), input_precision=PRECISION)
    if end_ptr is not None:
        tl.store(end_ptr + outside, state, mask=mask & is_last & has_state)


@Kernel
def _outputs_kernel(
    x_ptr, b_ptr, c_ptr, sums_ptr, steps_ptr, skip_ptr, chunks_ptr, states_ptr, out_ptr,
    x_stride, b_stride, c_stride, num_tokens, heads, group,
    SIZE: tl.constexpr, DIM: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = heads // HEADS
    chunk, first_head = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * HEADS
    start, length = tl.load(chunks_ptr + 2 * chunk).to(tl.int64), tl.load(chunks_ptr + 2 * chunk + 1)
    if length == 0:
        return
    rows = tl.arange(0, SIZE)
    inside, token = rows < length, start + rows
    b_ptr += first_head // group * DIM
    c_ptr += first_head // group * DIM
    products, diagonal, _, c = products_of(
        b_ptr, c_ptr, b_stride, c_stride, token, inside, SIZE, DIM, COLUMNS, PRECISION
    )
    for number in range(HEADS):
        head = first_head + number
        at = head.to(tl.int64) * num_tokens + token
        sums = tl.load(sums_ptr + at, mask=inside, other=0.0)
        steps = tl.load(steps_ptr + at, mask=inside, other=0.0)
        weights = (products * factors_of(sums) * steps[None, :]).to(x_ptr.dtype.element_ty)
        growth, to_itself = tl.exp(sums.to(tl.float32)), diagonal * steps
        if skip_ptr is not None:
            to_itself += tl.load(skip_ptr + head).to(tl.float32)
        state_ptr = states_ptr + (chunk * heads + head) * (DIM * HEAD_DIM)
        for row_block in range(0, HEAD_DIM, ROWS):
            row = row_block + tl.arange(0, ROWS)
            out = products_with_state(
                c, c_ptr, c_stride, token, inside, state_ptr, row, DIM, HEAD_DIM, COLUMNS, PRECISION
            )
            x = load_rows(x_ptr + head * HEAD_DIM, x_stride, token, inside, row, HEAD_DIM)
            out = tl.dot(weights, x, out * growth[:, None], input_precision=PRECISION) + to_itself[:, None] * x
            target = out_ptr + (token[:, None] * heads + head) * HEAD_DIM + row[None, :]
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (row < HEAD_DIM)[None, :])


class Chunks(NamedTuple):
    """The chunks of packed sequences, and what the heads multiply by.

    Attributes:
        size: C.
        cu_seqlens: The boundaries `[N+1]`.
        starts: The first token and the length of each chunk, `[M, 2]` int32; spare chunks, with length 0, come last.
        first: The first chunk of each sequence that is not empty, `[N]` int32.
        sums: The sums of the log decays from the beginning of a chunk on, `[V, T]`, fp64 for fp32 inputs.
        steps: dt, `[V, T]` fp32.
    """

    size: int
    cu_seqlens: Tensor
    starts: Tensor
    first: Tensor
    sums: Tensor
    steps: Tensor


def chunks_of(x: Tensor, steps: Tensor, log_decay: Tensor, cu_seqlens: Tensor, size: int) -> Chunks:
    """Cut the sequences into chunks of `size` tokens, or of fewer where sequences are shorter on average."""
    (tokens, heads), num_sequences = steps.shape, len(cu_seqlens) - 1
    while size > _LEAST_SIZE and size * num_sequences > tokens:
        size //= 2
    num_chunks = max((tokens + num_sequences * (size - 1)) // size, 1)
    starts, first = (cu_seqlens.new_empty(shape) for shape in ((num_chunks, 2), (num_sequences,)))
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    sums, head_steps = steps.new_empty(heads, tokens, dtype=wide), steps.new_empty(heads, tokens)
    block = min(16, next_power_of_2(heads))
    _chunks_kernel[(num_chunks, cdiv(heads, block))](
        cu_seqlens, steps.contiguous(), log_decay.contiguous(), starts, first, sums, head_steps,
        num_sequences, tokens, heads,
        SIZE=size, SEQUENCES=min(1024, next_power_of_2(num_sequences)), HEADS=block, num_warps=4,
    )  # fmt: skip
    return Chunks(size, cu_seqlens, starts, first, sums, head_steps)


def states_of(
    x: Tensor, b: Tensor, chunks: Chunks, tiles: Tiles, start: Tensor | None, states: Tensor | None, end: Tensor | None,
    *, d_states: Tensor | None = None, slices: int = 0, reverse: bool = False,
) -> Tensor | None:  # fmt: skip
    """Write the states before the chunks to `states [M, V, E, D]` and those behind sequences to `end [N, V, D, E]`.

    `reverse` does the same from the last chunk to the first: with gradients of the outputs for x, and C for B, the
    gradients of the states behind the chunks and before the sequences. With `slices` > 0, `start` and `end` are those
    of this many equal parts of the sequences; see `linear_attention.chunks.Chunks.of_slices`.

    Returns:
        The scalar products of the states with `d_states`, `[M, V]` fp32; None without `d_states`.
    """
    (tokens, heads, head_dim), (_, groups, dim) = x.shape, b.shape
    rows, columns = parts_of(tiles.state, head_dim, dim)
    num_sequences, num_chunks, parts = len(chunks.first), len(chunks.starts), cdiv(head_dim, rows) * cdiv(dim, columns)
    products = None if d_states is None else chunks.steps.new_empty(parts, num_chunks, heads)
    _states_kernel[(num_sequences, heads, parts)](
        x, b, chunks.sums, chunks.steps, chunks.cu_seqlens, chunks.first, start, states, end, d_states, products,
        x.stride(0), b.stride(0), tokens, heads, heads // groups, num_sequences // slices if slices else 1, num_chunks,
        SIZE=chunks.size, DIM=dim, HEAD_DIM=head_dim, ROWS=rows, COLUMNS=columns, REVERSE=reverse,
        PRECISION=precision_of(x), num_warps=tiles.warps[0], num_stages=tiles.stages[0],
    )  # fmt: skip
    return None if products is None else products.sum(0)


@on_its_device
def forward(
    x: Tensor, steps: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, skip: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor, out: Tensor, end: Tensor | None, slices: int,
) -> None:  # fmt: skip
    """Write the outputs `[T, V, E]` and, if asked for, the states `end [N, V, D, E]`; see `state_space_dual`."""
    tiles = FORWARD[x.dtype]
    x, b, c = (rows_of(tensor) for tensor in (x, b, c))
    (tokens, heads, head_dim), (_, groups, dim) = x.shape, b.shape
    chunks = chunks_of(x, steps, log_decay, cu_seqlens, tiles.size)
    states = x.new_empty(len(chunks.starts), heads, head_dim, dim)
    states_of(x, b, chunks, tiles, contiguous(initial_state), states, end, slices=slices)
    block, (rows, columns) = gcd(heads // groups, tiles.heads), parts_of(tiles.part, head_dim, dim)
    _outputs_kernel[(len(chunks.starts) * (heads // block),)](
        x, b, c, chunks.sums, chunks.steps, skip, chunks.starts, states, out,
        x.stride(0), b.stride(0), c.stride(0), tokens, heads, heads // groups,
        SIZE=chunks.size, DIM=dim, HEAD_DIM=head_dim, ROWS=rows, COLUMNS=columns, HEADS=block,
        PRECISION=precision_of(x), num_warps=tiles.warps[1], num_stages=tiles.stages[1],
    )  # fmt: skip


@on_its_device
def maps_of_slices(x: Tensor, steps: Tensor, log_decay: Tensor, b: Tensor, cu_seqlens: Tensor, maps: Tensor) -> None:
    """Write what each of the equal slices of the tokens makes of a state before it; see `operators.slice_maps`."""
    tiles, slices = FORWARD[x.dtype], len(maps)
    x, b = rows_of(x), rows_of(b)
    chunks = chunks_of(x, steps, log_decay, cu_seqlens, tiles.size)
    end = maps.new_empty(slices, *maps.shape[1:3], x.shape[2])
    states_of(x, b, chunks, tiles, None, None, end, slices=slices)
    factors = log_decay.double().unflatten(0, (slices, -1)).sum(1).exp()
    is_one_sequence = (cu_seqlens.diff() > 0).view(slices, -1).sum(1) == 1
    maps[..., 0] = (factors * is_one_sequence[:, None])[..., None]
    maps[..., 1:] = end


def rows_of(x: Tensor) -> Tensor:
    """Return `x [T, heads, size]` with the numbers of a token side by side; tokens can be apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    """Return a contiguous `x`, or None."""
    return None if x is None else x.contiguous()


def precision_of(x: Tensor) -> str:
    """Return the precision of products of fp32 tensors; those of bf16 tensors have only one."""
    return "tf32x3" if x.dtype == torch.float32 else "ieee"


def parts_of(most: tuple[int, int], head_dim: int, dim: int) -> tuple[int, int]:
    """Return the rows and columns of a state `[E, D]` that a program takes at a time, powers of two."""
    rows, columns = (min(limit, max(16, next_power_of_2(n))) for limit, n in zip(most, (head_dim, dim), strict=True))
    return rows, columns
