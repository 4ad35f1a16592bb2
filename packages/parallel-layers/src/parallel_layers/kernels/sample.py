"""Draw a token of each row of logits, and its log-prob, by two passes over the logits.

The first kernel keeps the maximum and the sum of exponentials of each block of the vocabulary. The second finds the
block in which the cumulative sum passes the row's number, and reads that block alone.

Shape legend: N rows, V vocabulary, J blocks of the vocabulary.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton

_BLOCK = 2048


@triton.jit
def _statistics_kernel(logits_ptr, stats_ptr, stride, vocab_size, temperature, BLOCK: tl.constexpr):
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + at, mask=at < vocab_size, other=float("-inf")) / temperature
    highest = tl.max(x, 0)
    # A block of -inf alone has the sum 0.
    total = tl.sum(tl.exp(x - tl.where(highest == float("-inf"), 0.0, highest)), 0)
    tl.store(stats_ptr + (row * blocks + block) * 2, highest)
    tl.store(stats_ptr + (row * blocks + block) * 2 + 1, total)


@triton.jit
def _choice_kernel(
    logits_ptr, stats_ptr, uniforms_ptr, tokens_ptr, log_probs_ptr, stride, vocab_size, blocks, temperature,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCKS)
    there = each < blocks
    maxima = tl.load(stats_ptr + (row * blocks + each) * 2, mask=there, other=float("-inf"))
    sums = tl.load(stats_ptr + (row * blocks + each) * 2 + 1, mask=there, other=0.0)
    highest = tl.max(maxima, 0)
    weights = sums * tl.exp(maxima - highest)
    passed = tl.cumsum(weights, 0)
    total = tl.sum(weights, 0)
    target = tl.load(uniforms_ptr + row) * total
    # Rounding may leave the last cumulative sum below the target: take the last block, or token, that has weight.
    last = tl.max(tl.where(weights > 0.0, each, 0), 0)
    block = tl.minimum(tl.sum((passed <= target).to(tl.int32), 0), last)
    rest = target - tl.sum(tl.where(each < block, weights, 0.0), 0)
    inside = tl.arange(0, BLOCK)
    at = block * BLOCK + inside
    x = tl.load(logits_ptr + row * stride + at, mask=at < vocab_size, other=float("-inf")) / temperature
    exponentials = tl.exp(x - highest)
    last = tl.max(tl.where(exponentials > 0.0, inside, 0), 0)
    token = tl.minimum(tl.sum((tl.cumsum(exponentials, 0) <= rest).to(tl.int32), 0), last)
    chosen = tl.sum(tl.where(inside == token, x, 0.0), 0)
    tl.store(tokens_ptr + row, tl.minimum(block * BLOCK + token, vocab_size - 1).to(tl.int64))
    tl.store(log_probs_ptr + row, chosen - highest - tl.log(total))


@on_its_device
def launch(logits_NV: Tensor, uniforms_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return tokens `[N]` int64 and their log-probs `[N]` for fp32 logits, whose rows are contiguous."""
    num, vocab_size = logits_NV.shape
    blocks = cdiv(vocab_size, _BLOCK)
    stats = logits_NV.new_empty(num, blocks, 2)
    tokens, log_probs = logits_NV.new_empty(num, dtype=torch.int64), logits_NV.new_empty(num)
    if num:
        _statistics_kernel[(num, blocks)](
            logits_NV, stats, logits_NV.stride(0), vocab_size, temperature, BLOCK=_BLOCK, num_warps=8
        )
        _choice_kernel[(num,)](
            logits_NV, stats, uniforms_N, tokens, log_probs, logits_NV.stride(0), vocab_size, blocks, temperature,
            BLOCK=_BLOCK, BLOCKS=next_power_of_2(blocks), num_warps=8,
        )  # fmt: skip
    return tokens, log_probs
