"""Exchanges of small tensors in one kernel each, over memory that GPUs map from each other.

All-reduce, reduce-scatter and all-gather; and an all-reduce with the residual addition and RMSNorm behind it.

Each rank writes its tensor to a buffer of its own, tells the others, waits for them, and reads all buffers. A block
of the grid waits for the same block of the other ranks alone. Sums are taken in fp32 in the order of the ranks, and
rounded once, so all ranks hold the same bits. The buffer has two halves, which calls use in turn: a rank writes to a
half again when all ranks have begun the call after the one that reads it.

Shape legend: R ranks, n elements of a rank's tensor (of a reduce-scatter: of its result), T tokens, H hidden size.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Literal

from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton

BLOCKS = 128
"""Most blocks of the grid. All of them run at a time on every GPU, so that none waits for one that has not begun."""

MAX_RANKS = 16
FLAG_BYTES = 4 * BLOCKS * MAX_RANKS
"""The first bytes of a buffer: for each block and rank the number of the call that the rank has reached, int32."""

_TILE = 4096
_WARPS = 8
_SPINS = 1 << 30  # some minutes, as the group's collectives wait


@triton.jit
def _meet(table, block, call, rank, spins, RANKS: tl.constexpr):
    """Tell the same block of every rank that this rank has written its tensor, and wait until all have."""
    flags = tl.pointer_type(tl.int32)
    own = tl.load(table + rank)
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        flag = tl.load(table + peer).to(flags) + block * RANKS + rank
        tl.atomic_xchg(flag, call, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        left = spins
        while tl.atomic_add(own.to(flags) + block * RANKS + peer, 0, sem="acquire", scope="sys") < call:
            left -= 1
            if left == 0:
                tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def _exchange_kernel(
    x_ptr, y_ptr, buffers, counters_ptr, size, half, rank, spins,
    RANKS: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr, FLAGS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    call = tl.load(counters_ptr + block) + 1
    table = buffers.to(tl.pointer_type(tl.uint64))
    data = tl.pointer_type(x_ptr.dtype.element_ty)
    place = (call % 2) * half
    # Vectors of 16 bytes: Triton knows nothing of an address that it has loaded.
    own_data = tl.multiple_of((tl.load(table + rank) + FLAGS).to(data), 16)
    step = tl.cdiv(tl.cdiv(size, TILE), tl.num_programs(0)) * TILE
    begin = block * step
    end = tl.minimum(begin + step, size)
    for part in range(PARTS):
        for start in range(begin, end, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(x_ptr + part * size + at, mask=at < end)
            tl.store(own_data + place + part * size + at, x, mask=at < end)
    _meet(table, block, call, rank, spins, RANKS)
    # A reduce-scatter reads this rank's part.
    first = place + rank * size if PARTS > 1 else place
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        total = tl.zeros((TILE,), tl.float32)
        for peer in tl.static_range(RANKS):
            peer_data = tl.multiple_of((tl.load(table + peer) + FLAGS).to(data), 16)
            x = tl.load(peer_data + first + at, mask=at < end, cache_modifier=".cg")
            if SUMS:
                total += x.to(tl.float32)
            else:
                tl.store(y_ptr + peer * size + at, x, mask=at < end)
        if SUMS:
            tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=at < end)
    tl.store(counters_ptr + block, call)


@triton.jit
def _sum_and_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, total_ptr, buffers, counters_ptr, count, half, rank, spins, eps,
    RANKS: tl.constexpr, FLAGS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    call = tl.load(counters_ptr + block) + 1
    table = buffers.to(tl.pointer_type(tl.uint64))
    dtype = x_ptr.dtype.element_ty
    data = tl.pointer_type(dtype)
    place = (call % 2) * half
    own_data = tl.multiple_of((tl.load(table + rank) + FLAGS).to(data), 16)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < SIZE
    for row in range(block, count, tl.num_programs(0)):
        x = tl.load(x_ptr + row * SIZE + column, mask=inside)
        tl.store(own_data + place + row * SIZE + column, x, mask=inside)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            weight += 1.0
    _meet(table, block, call, rank, spins, RANKS)
    for row in range(block, count, tl.num_programs(0)):
        residual = tl.load(residual_ptr + row * SIZE + column, mask=inside, other=0.0)
        total = tl.zeros((1, BLOCK), tl.float32)
        for peer in tl.static_range(RANKS):
            peer_data = tl.multiple_of((tl.load(table + peer) + FLAGS).to(data), 16)
            x = tl.load(peer_data + place + row * SIZE + column, mask=inside, other=0.0, cache_modifier=".cg")
            total += x.to(tl.float32)
        stream = (total.to(dtype).to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row * SIZE + column, stream, mask=inside)
        if NORM:
            wide = stream.to(tl.float32)
            rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
            tl.store(normed_ptr + row * SIZE + column, (wide * rstd[:, None] * weight).to(dtype), mask=inside)
    tl.store(counters_ptr + block, call)


@on_its_device
def sum_and_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    total: Tensor,
    normed: Tensor,
    *,
    eps: float,
    unit_offset: bool,
    buffers: int,
    half_bytes: int,
    counters: Tensor,
    rank: int,
    ranks: int,
) -> None:
    """Write the sum of x over the ranks and the residual to `total`, and its RMSNorm to `normed`.

    Roundings are those of an all-reduce, an addition and a norm (`kernels.rms_norm`). A block has whole rows.

    Args:
        x, residual: `[T, H]`, contiguous, of one dtype.
        weight: `[H]`, or None: `normed` is not written.
        total, normed: `[T, H]`.
        eps, unit_offset: See `rms_norm`.
        buffers, half_bytes, counters, rank, ranks: See `exchange`.
    """
    size = x.shape[-1]
    tile = next_power_of_2(size)
    _sum_and_norm_kernel[(BLOCKS,)](
        x, residual, weight, normed, total, buffers, counters, x.numel() // size, half_bytes // x.element_size(), rank,
        _SPINS, eps, RANKS=ranks, FLAGS=FLAG_BYTES, SIZE=size, BLOCK=tile, NORM=weight is not None,
        UNIT_OFFSET=unit_offset, num_warps=max(1, min(16, tile // 256)),
    )  # fmt: skip


@on_its_device
def exchange(
    x: Tensor,
    out: Tensor,
    kind: Literal["all-reduce", "reduce-scatter", "all-gather"],
    *,
    buffers: int,
    half_bytes: int,
    counters: Tensor,
    rank: int,
    ranks: int,
) -> None:
    """Write the result of an exchange of contiguous tensors to `out`; every rank of the group calls this.

    Args:
        x: `[n]` in any shape; of a reduce-scatter `[R, n]`.
        out: `[n]` in any shape; of an all-gather `[R, n]`.
        kind: What is exchanged.
        buffers: The address on the GPU of the ranks' addresses of buffers of `FLAG_BYTES`, zero at first, and twice
            `half_bytes`.
        half_bytes: At least the bytes of x.
        counters: `[BLOCKS]` int32 on this rank: the number of calls so far, zero at first.
        rank, ranks: This rank, and R, at most `MAX_RANKS`.
    """
    parts = ranks if kind == "reduce-scatter" else 1
    size = x.numel() // parts
    # Every call uses all blocks: a block's calls are counted alike on all ranks.
    _exchange_kernel[(BLOCKS,)](
        x, out, buffers, counters, size, half_bytes // x.element_size(), rank, _SPINS,
        RANKS=ranks, PARTS=parts, SUMS=kind != "all-gather", FLAGS=FLAG_BYTES,
        TILE=min(_TILE, max(256, 1 << (cdiv(size, BLOCKS) - 1).bit_length())), num_warps=_WARPS,
    )  # fmt: skip
