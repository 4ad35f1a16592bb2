"""The logits of a few groups of vocabulary entries for each token, by the GEMM of the groups that tokens share.

The pairs of a token and a group are sorted by group. A program multiplies up to BT tokens of one group by its BG rows.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor

from parallel_layers.kernels.head_triton import LOG2_E, OUTSIDE, row_factor, tanh_of
from parallel_layers.kernels.runtime import cdiv, on_its_device, tl, triton

GROUP_ENTRIES = 64
"""Vocabulary entries of a group."""

_TOKENS = 64


@triton.jit
def group_logits_kernel(
    hidden_ptr,
    weight_ptr,
    bits_ptr,
    inverse_temperatures_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    group_of_block_ptr,
    logits_ptr,
    num_tokens,
    num_groups,
    num_entries,
    hidden_size,
    scale,
    softcap,
    inverse_temperature,
    K: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    BG: tl.constexpr,
    BH: tl.constexpr,
):
    """Write the logits times log2 e of each pair, `[pairs, BG]`; see `product_statistics_kernel`."""
    block = tl.program_id(0)
    group = tl.load(group_of_block_ptr + block)
    if group < num_groups:
        first = tl.load(offsets_ptr + group) + (block - tl.load(blocks_ptr + group)) * BT
        at = first + tl.arange(0, BT)
        inside = at < tl.load(offsets_ptr + group + 1)
        pairs = tl.load(pairs_ptr + at, mask=inside, other=0)
        rows = pairs // K
        entries = group * BG + tl.arange(0, BG)
        product = tl.zeros((BT, BG), dtype=tl.float32)
        for begin in range(0, hidden_size, BH):
            columns = begin + tl.arange(0, BH)
            within = (columns < hidden_size)[None, :]
            x = tl.load(
                hidden_ptr + rows[:, None] * hidden_size + columns[None, :], mask=inside[:, None] & within, other=0.0
            )
            w = tl.load(
                weight_ptr + entries[:, None] * hidden_size + columns[None, :],
                mask=(entries < num_entries)[:, None] & within,
                other=0.0,
            )
            product = tl.dot(x, w.T, product)
        factor = row_factor(inverse_temperatures_ptr, rows, num_tokens, inverse_temperature) * LOG2_E
        if SOFTCAP:
            z = tanh_of(product * (scale / softcap)) * (softcap * factor)[:, None]
        else:
            z = product * (scale * factor)[:, None]
        keeps = (entries < num_entries)[None, :] & inside[:, None]
        if bits_ptr is not None:
            column = entries % BV
            words = (entries // BV * 8 + column % 8) * num_tokens
            of_rows = tl.load(bits_ptr + words[None, :] + rows[:, None], mask=keeps, other=0)
            keeps = ((of_rows >> (column // 8)[None, :]) & 1) != 0
        out = logits_ptr + pairs[:, None] * BG + tl.arange(0, BG)[None, :]
        tl.store(out, tl.where(keeps, z, OUTSIDE), mask=inside[:, None])


@on_its_device
def group_logits(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    groups_TK: Tensor,
    bits: Tensor | None,
    inverse_temperatures: Tensor | None,
    numbers: tuple[float, float, float],
    block_v: int,
) -> Tensor:
    """Return the logits times log2 e of K groups of each token, `[T, K * GROUP_ENTRIES]`.

    `bits` are those of a sampling mask, in tiles of `block_v` entries.
    """
    (num_tokens, hidden_size), num_entries = hidden_TH.shape, len(weight_VH)
    k, num_groups = groups_TK.shape[1], cdiv(num_entries, GROUP_ENTRIES)
    # Only rows of NaN have groups beyond the vocabulary.
    sorted_groups, pairs = groups_TK.clamp(max=num_groups - 1).int().flatten().sort()
    offsets = torch.searchsorted(sorted_groups, torch.arange(num_groups + 1, device=pairs.device, dtype=torch.int32))
    blocks_of_group = (offsets.diff() + (_TOKENS - 1)) // _TOKENS
    ends = blocks_of_group.cumsum(0)
    # Known without waiting for the device: every group has at most one block that is not full.
    num_blocks = num_groups + len(pairs) // _TOKENS
    group_of_block = torch.searchsorted(ends, torch.arange(num_blocks, device=pairs.device), right=True)
    logits = torch.empty(num_tokens, k * GROUP_ENTRIES, dtype=torch.float32, device=pairs.device)
    group_logits_kernel[(num_blocks,)](
        hidden_TH,
        weight_VH,
        bits,
        inverse_temperatures,
        pairs,
        offsets,
        ends - blocks_of_group,
        group_of_block,
        logits,
        num_tokens,
        num_groups,
        num_entries,
        hidden_size,
        *numbers,
        K=k,
        SOFTCAP=numbers[1] != 0.0,
        BT=_TOKENS,
        BV=block_v,
        BG=GROUP_ENTRIES,
        BH=64,
        num_warps=4,
        num_stages=4,
    )
    return logits
