"""Kernels of sampling masks: their check, and their rows as bits that the head's kernels read.

The ids of row t are `ids[offsets[t] : offsets[t + 1]]`; see `parallel_layers.head.sampling_mask`.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import on_its_device, tl, triton


@triton.jit
def mask_bits_kernel(
    ids_ptr, offsets_ptr, bits_ptr, num_tokens, first_entry, num_entries, BV: tl.constexpr, BLOCK: tl.constexpr
):
    """Set the bits `[N, 8, T]` int32 of the kept entries of a row: bit j of word i of a tile is its column 8 j + i.

    A thread of the kernels below holds all columns 8 j + i of a row for one or two i, and so reads few words.
    """
    row = tl.program_id(0)
    end = tl.load(offsets_ptr + row + 1)
    for begin in range(tl.load(offsets_ptr + row), end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        entries = tl.load(ids_ptr + at, mask=at < end, other=-1) - first_entry
        inside = (at < end) & (entries >= 0) & (entries < num_entries)
        columns = entries % BV
        words = (entries // BV * 8 + columns % 8).to(tl.int64) * num_tokens + row
        tl.atomic_or(bits_ptr + words, 1 << (columns // 8), mask=inside, sem="relaxed")


@triton.jit
def kept(bits_ptr, tile_v, rows, num_tokens, BT: tl.constexpr, BV: tl.constexpr):
    """Return which entries of a tile `[BT, BV]` the sampling mask keeps."""
    columns = tl.arange(0, BV)
    inside = rows < num_tokens
    words = tl.zeros((BT, BV), tl.int32)
    for number in tl.static_range(8):
        of_rows = tl.load(bits_ptr + (tile_v * 8 + number).to(tl.int64) * num_tokens + rows, mask=inside, other=0)
        words = tl.where((columns % 8 == number)[None, :], of_rows[:, None], words)
    return ((words >> (columns // 8)[None, :]) & 1) != 0


@triton.jit
def _check_kernel(ids_ptr, offsets_ptr, labels_ptr, counts_ptr, num_tokens, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    end = tl.load(offsets_ptr + row + 1)
    label = tl.load(labels_ptr + row)
    labels = tl.zeros((BLOCK,), tl.int32)
    outside = tl.zeros((BLOCK,), tl.int32)
    for begin in range(tl.load(offsets_ptr + row), end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, mask=at < end, other=-1)
        labels += ((ids == label) & (at < end)).to(tl.int32)
        outside += (((ids < 0) | (ids >= vocab_size)) & (at < end)).to(tl.int32)
    tl.store(counts_ptr + row, tl.sum(labels, 0))
    tl.store(counts_ptr + num_tokens + row, tl.sum(outside, 0))


@on_its_device
def label_counts(ids: Tensor, offsets: Tensor, labels_T: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return how often each row has its label, and how many of its ids are outside the vocabulary, `[T]` int32."""
    counts = torch.empty(2, len(labels_T), dtype=torch.int32, device=ids.device)
    if len(labels_T) and not ids.is_meta:
        rows = ids.contiguous(), offsets.contiguous(), labels_T.contiguous()
        _check_kernel[(len(labels_T),)](*rows, counts, len(labels_T), vocab_size, BLOCK=1024, num_warps=4)
    labels, outside = counts.unbind()
    return labels, outside
