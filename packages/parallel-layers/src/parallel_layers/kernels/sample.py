"""Draw a token of each row of logits, and its log-prob, by two passes over the logits.

The first kernel keeps the maximum and the sum of exponentials of each block of the vocabulary. The second finds the
block in which the cumulative sum passes the row's number, and reads that block alone.

For min-p, top-k and top-p a third kernel finds the smallest logit that may be drawn, by a search over the bits of a
float: the number of tokens from a threshold on (their probability) falls with the threshold. Tokens as likely as the
last kept token are kept, too.

Shape legend: N rows, V vocabulary, J blocks of the vocabulary.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton

_BLOCK = 2048
# Thresholds that one pass over a row tries: 8 find one of 2^32 in 11 passes.
_WAYS = 8


@triton.jit
def _load(row_ptr, at, vocab_size, temperature, smallest):
    x = tl.load(row_ptr + at, mask=at < vocab_size, other=float("-inf")) / temperature
    return tl.where(x < smallest, float("-inf"), x)


@triton.jit
def _statistics_kernel(
    logits_ptr, smallest_ptr, stats_ptr, stride, vocab_size, temperature,
    BLOCK: tl.constexpr, TRUNCATED: tl.constexpr,
):  # fmt: skip
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    smallest = tl.load(smallest_ptr + row) if TRUNCATED else float("-inf")
    x = _load(logits_ptr + row * stride, block * BLOCK + tl.arange(0, BLOCK), vocab_size, temperature, smallest)
    highest = tl.max(x, 0)
    # A block of -inf alone has the sum 0.
    total = tl.sum(tl.exp(x - tl.where(highest == float("-inf"), 0.0, highest)), 0)
    tl.store(stats_ptr + (row * blocks + block) * 2, highest)
    tl.store(stats_ptr + (row * blocks + block) * 2 + 1, total)


@triton.jit
def _row_statistics(stats_ptr, row, blocks, BLOCKS: tl.constexpr):
    """Return the row's maximum, and the sum of exponentials of each block."""
    block = tl.arange(0, BLOCKS)
    maxima = tl.load(stats_ptr + (row * blocks + block) * 2, mask=block < blocks, other=float("-inf"))
    sums = tl.load(stats_ptr + (row * blocks + block) * 2 + 1, mask=block < blocks, other=0.0)
    highest = tl.max(maxima, 0)
    return highest, sums * tl.exp(maxima - highest)


@triton.jit
def _ordered(x):
    """Return an integer for each fp32 number, in the same order; the function is its own inverse on the bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _measure(
    row_ptr, vocab_size, temperature, highest, least, WAYS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    """Return for each of the `[WAYS]` thresholds the number of tokens from it on, or their sum of exponentials."""
    totals = tl.zeros((WAYS, BLOCK), tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        x = _load(row_ptr, begin + tl.arange(0, BLOCK), vocab_size, temperature, float("-inf"))
        weight = tl.where(x > float("-inf"), 1.0 if COUNT else tl.exp(x - highest), 0.0)
        totals += tl.where(_ordered(x)[None, :] >= least[:, None], weight[None, :], 0.0)
    return tl.sum(totals, 1)


@triton.jit
def _largest_threshold(
    row_ptr, vocab_size, temperature, highest, least, target,
    WAYS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Return the largest threshold from `least` on whose tokens measure at least `target`."""
    low, high = least.to(tl.int64), _ordered(highest).to(tl.int64)
    way = tl.arange(0, WAYS).to(tl.int64)
    while low < high:
        # The last of these is `high`; they divide the rest evenly.
        tried = low + ((high - low) * (way + 1) + WAYS - 1) // WAYS
        # False for NaN, so that the search ends for a broken row.
        enough = _measure(row_ptr, vocab_size, temperature, highest, tried.to(tl.int32), WAYS, BLOCK, COUNT) >= target
        low = tl.maximum(low, tl.max(tl.where(enough, tried, low), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, tried - 1), 0))
    return low.to(tl.int32)


@triton.jit
def _truncation_kernel(
    logits_ptr, stats_ptr, smallest_ptr, stride, vocab_size, blocks, temperature, top_k, top_p, log_min_p,
    WAYS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    highest, _ = _row_statistics(stats_ptr, row, blocks, BLOCKS)
    least = _ordered(highest + log_min_p)
    if TOP_K:
        least = _largest_threshold(row_ptr, vocab_size, temperature, highest, least, top_k, WAYS, BLOCK, True)
    if TOP_P:
        measure = _measure(row_ptr, vocab_size, temperature, highest, least + tl.zeros((1,), tl.int32), 1, BLOCK, False)
        target = top_p * tl.sum(measure, 0)
        least = _largest_threshold(row_ptr, vocab_size, temperature, highest, least, target, WAYS, BLOCK, False)
    tl.store(smallest_ptr + row, (least ^ ((least >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


@triton.jit
def _choice_kernel(
    logits_ptr, smallest_ptr, stats_ptr, kept_stats_ptr, uniforms_ptr, normalizers_ptr, tokens_ptr, log_probs_ptr,
    stride, vocab_size, blocks, temperature,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TRUNCATED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block_number = tl.arange(0, BLOCKS)
    highest, all_weights = _row_statistics(stats_ptr, row, blocks, BLOCKS)
    _, weights = _row_statistics(kept_stats_ptr, row, blocks, BLOCKS)
    passed = tl.cumsum(weights, 0)
    target = tl.load(uniforms_ptr + row)
    if SHARED:
        normalizer = tl.load(normalizers_ptr + row)
    else:
        target *= tl.sum(weights, 0)
        normalizer = highest + tl.log(tl.sum(all_weights, 0))
    # Rounding may leave the last cumulative sum below the target: take the last block, or token, that has weight.
    last_weighted = tl.max(tl.where(weights > 0.0, block_number, 0), 0)
    block = tl.minimum(tl.sum((passed <= target).to(tl.int32), 0), last_weighted)
    remainder = target - tl.sum(tl.where(block_number < block, weights, 0.0), 0)
    inside = tl.arange(0, BLOCK)
    smallest = tl.load(smallest_ptr + row) if TRUNCATED else float("-inf")
    x = _load(logits_ptr + row * stride, block * BLOCK + inside, vocab_size, temperature, smallest)
    exponentials = tl.exp(x - highest)
    last_weighted = tl.max(tl.where(exponentials > 0.0, inside, 0), 0)
    token = tl.minimum(tl.sum((tl.cumsum(exponentials, 0) <= remainder).to(tl.int32), 0), last_weighted)
    chosen = tl.sum(tl.where(inside == token, x, 0.0), 0)
    tl.store(tokens_ptr + row, tl.minimum(block * BLOCK + token, vocab_size - 1).to(tl.int64))
    tl.store(log_probs_ptr + row, chosen - normalizer)


@triton.jit
def _bits_kernel(logits_ptr, smallest_ptr, bits_ptr, stride, vocab_size, words, temperature, BLOCK: tl.constexpr):
    """Write the bits of the kept tokens: bit j of word w is token 32 w + j."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    smallest = tl.load(smallest_ptr + row)
    x = _load(logits_ptr + row * stride, block * BLOCK + tl.arange(0, BLOCK), vocab_size, temperature, smallest)
    kept = (x > float("-inf")).to(tl.int32).reshape(BLOCK // 32, 32) << tl.arange(0, 32)[None, :]
    at = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    tl.store(bits_ptr + row * words + at, tl.sum(kept, 1), mask=at < words)


@on_its_device
def draw_tokens(
    logits_NV: Tensor,
    uniforms_N: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    with_mask: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens `[N]` int64, their log-probs `[N]`, and bits of the kept tokens, for contiguous fp32 logits.

    The log-probs are those before the truncation, and the bits are empty; with `with_mask` the log-probs are those
    among the kept tokens. See `inference.sampling.sample_with_mask`.
    """
    num, vocab_size = logits_NV.shape
    blocks, stride = cdiv(vocab_size, _BLOCK), logits_NV.stride(0)
    width = next_power_of_2(blocks)
    tokens, log_probs = logits_NV.new_empty(num, dtype=torch.int64), logits_NV.new_empty(num)
    stats, smallest = logits_NV.new_empty(num, blocks, 2), torch.empty_like(log_probs)
    kept_stats, truncated = stats, with_mask or top_k is not None or top_p < 1 or min_p > 0
    bits = tokens.new_empty(num, cdiv(vocab_size, 32) * with_mask, dtype=torch.int32)
    if num:
        numbers = (stride, vocab_size, temperature)
        _statistics_kernel[(num, blocks)](
            logits_NV, smallest, stats, *numbers, BLOCK=_BLOCK, TRUNCATED=False, num_warps=8
        )
        if truncated:
            kept_stats = torch.empty_like(stats)
            _truncation_kernel[(num,)](
                logits_NV, stats, smallest, stride, vocab_size, blocks, temperature, float(top_k or 0), top_p,
                math.log(min_p) if min_p else -math.inf,
                WAYS=_WAYS, BLOCK=_BLOCK, BLOCKS=width, TOP_K=top_k is not None, TOP_P=top_p < 1, num_warps=8,
            )  # fmt: skip
            _statistics_kernel[(num, blocks)](
                logits_NV, smallest, kept_stats, *numbers, BLOCK=_BLOCK, TRUNCATED=True, num_warps=8
            )
        _choice_kernel[(num,)](
            logits_NV, smallest, kept_stats if with_mask else stats, kept_stats, uniforms_N, smallest, tokens,
            log_probs, stride, vocab_size, blocks, temperature,
            BLOCK=_BLOCK, BLOCKS=width, TRUNCATED=truncated, SHARED=False, num_warps=8,
        )  # fmt: skip
        if with_mask:
            _bits_kernel[(num, blocks)](
                logits_NV, smallest, bits, stride, vocab_size, bits.shape[1], temperature, BLOCK=_BLOCK, num_warps=8
            )
    return tokens, log_probs, bits.view(torch.uint8)


@on_its_device
def row_statistics(logits_NV: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the statistics of blocks for `draw_from_share`, and each row's maximum and sum of exponentials `[N]`.

    The sum is relative to the maximum; 0 for -inf alone.
    """
    num, vocab_size = logits_NV.shape
    stats = logits_NV.new_empty(num, cdiv(vocab_size, _BLOCK), 2)
    if num:
        _statistics_kernel[stats.shape[:2]](
            logits_NV, stats, stats, logits_NV.stride(0), vocab_size, temperature,
            BLOCK=_BLOCK, TRUNCATED=False, num_warps=8,
        )  # fmt: skip
    maxima, sums = stats.unbind(-1)
    highest = maxima.amax(-1)
    # A block of -inf alone has the sum 0, or NaN.
    sums = torch.where(maxima == -torch.inf, sums, sums * (maxima - highest[:, None]).exp())
    return stats, highest, sums.sum(-1)


@on_its_device
def draw_from_share(
    logits_NV: Tensor, stats: Tensor, targets_N: Tensor, normalizers_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the token in which the cumulative sum of exponentials, relative to the row's maximum, passes a target.

    The log-prob is the logit less the row's normalizer. For logits and statistics of `row_statistics`: `[N]` each.
    """
    num, vocab_size = logits_NV.shape
    tokens, log_probs = logits_NV.new_empty(num, dtype=torch.int64), logits_NV.new_empty(num)
    if num:
        blocks = stats.shape[1]
        _choice_kernel[(num,)](
            logits_NV, log_probs, stats, stats, targets_N, normalizers_N, tokens, log_probs, logits_NV.stride(0),
            vocab_size, blocks, temperature,
            BLOCK=_BLOCK, BLOCKS=next_power_of_2(blocks), TRUNCATED=False, SHARED=True, num_warps=8,
        )  # fmt: skip
    return tokens, log_probs
