"""All-reduce, reduce-scatter and all-gather of small tensors in one kernel, over memory that GPUs map from each other.

Each rank writes its tensor to a buffer of its own, tells the others, waits for them, and reads all buffers. A block
of the grid waits for the same block of the other ranks alone. Sums are taken in fp32 in the order of the ranks, and
rounded once, so all ranks hold the same bits. The buffer has two halves, which calls use in turn: a rank writes to a
half again when all ranks have begun the call after the one that reads it.

Shape legend: R ranks, n elements of a rank's tensor (of a reduce-scatter: of its result).
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Literal

from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, on_its_device, tl, triton

BLOCKS = 128
"""Most blocks of the grid. All of them run at a time on every GPU, so that none waits for one that has not begun."""

MAX_RANKS = 16
FLAG_BYTES = 4 * BLOCKS * MAX_RANKS
"""The first bytes of a buffer: for each block and rank the number of the call that the rank has reached, int32."""

_TILE = 4096
_WARPS = 8
_SPINS = 1 << 30  # some minutes, as the group's collectives wait


@triton.jit
def _exchange_kernel(
    x_ptr, y_ptr, buffers, counters_ptr, size, half, rank, spins,
    RANKS: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr, FLAGS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    call = tl.load(counters_ptr + block) + 1
    table = buffers.to(tl.pointer_type(tl.uint64))
    data = tl.pointer_type(x_ptr.dtype.element_ty)
    flags = tl.pointer_type(tl.int32)
    own = tl.load(table + rank)
    place = (call % 2) * half
    # Vectors of 16 bytes: Triton knows nothing of an address that it has loaded.
    own_data = tl.multiple_of((own + FLAGS).to(data), 16)
    step = tl.cdiv(tl.cdiv(size, TILE), tl.num_programs(0)) * TILE
    begin = block * step
    end = tl.minimum(begin + step, size)
    for part in range(PARTS):
        for start in range(begin, end, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(x_ptr + part * size + at, mask=at < end)
            tl.store(own_data + place + part * size + at, x, mask=at < end)
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
