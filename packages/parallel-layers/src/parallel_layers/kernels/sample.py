"""Draw a token of each row of logits, and its log-prob, by two passes over the logits.

The first kernel keeps the maximum and the sum of exponentials of each block of the vocabulary. The second finds the
block in which the cumulative sum passes the row's number, and reads that block alone.

Rounds of another kernel search the threshold of top-p. A float's bits, read as an integer, have the floats' order. Each
round tries the integers that divide the range of the round before in 4 or 16 equal parts, and adds the weights of the
tokens of that range alone.

Shape legend: N rows, V vocabulary, J blocks of the vocabulary.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton

_BLOCK = 2048
# The likeliest token has the weight 2^40 in a search for the threshold of top-p.
WEIGHT_BITS = 40
# The bits that each round finds. The first rounds weigh nearly all tokens, which takes the longer the more they try.
_ROUNDS = (2,) * 8 + (4,) * 4
_SEARCH_BLOCK = 256
# Programs of a round that fill a GPU.
_PROGRAMS = 8192


@triton.jit
def _load(row_ptr, at, vocab_size, temperature, least):
    x = tl.load(row_ptr + at, mask=at < vocab_size, other=float("-inf"))
    return tl.where(x < least, float("-inf"), x) / temperature


@triton.jit
def _statistics_kernel(
    logits_ptr, least_ptr, stats_ptr, stride, vocab_size, temperature,
    BLOCK: tl.constexpr, TRUNCATED: tl.constexpr,
):  # fmt: skip
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    least = tl.load(least_ptr + row) if TRUNCATED else float("-inf")
    x = _load(logits_ptr + row * stride, block * BLOCK + tl.arange(0, BLOCK), vocab_size, temperature, least)
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
    """Return an integer for each fp32 number, in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _narrowed(sums_ptr, range_ptr, top_p_ptr, row, shift, WAYS: tl.constexpr):
    """Return the range that a round leaves: where it begins, the weight of the tokens above it and of all tokens."""
    way = tl.arange(0, WAYS)
    low, above = tl.load(range_ptr + row * 3), tl.load(range_ptr + row * 3 + 1)
    total = tl.load(range_ptr + row * 3 + 2)
    weights = above + tl.load(sums_ptr + row * WAYS + way)
    # The range of the first round has all tokens.
    total = tl.where(total == 0, tl.max(weights, 0), total)
    target = tl.ceil(tl.load(top_p_ptr) * total.to(tl.float64)).to(tl.int64)
    # The lowest threshold has enough weight by the round before.
    number = tl.sum((weights >= target).to(tl.int64), 0) - 1
    above = tl.where(number == WAYS - 1, above, tl.sum(tl.where(way == number + 1, weights, 0), 0))
    return low + (number << shift), above, total


@triton.jit
def _search_kernel(
    logits_ptr, highest_ptr, least_ptr, last_sums_ptr, last_range_ptr, sums_ptr, range_ptr, top_p_ptr,
    stride, vocab_size, temperature, last_shift, shift,
    WAYS: tl.constexpr, LAST_WAYS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, WEIGHT_BITS: tl.constexpr,
):  # fmt: skip
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if FIRST:
        first = tl.full((), -0x80000000, tl.int64)
        above, total = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    else:
        first, above, total = _narrowed(last_sums_ptr, last_range_ptr, top_p_ptr, row, last_shift, LAST_WAYS)
    if block == 0:
        tl.store(range_ptr + row * 3, first)
        tl.store(range_ptr + row * 3 + 1, above)
        tl.store(range_ptr + row * 3 + 2, total)
    low, highest, least = first.to(tl.int32), tl.load(highest_ptr + row), tl.load(least_ptr + row)
    way = tl.arange(0, WAYS)
    sums = tl.zeros((WAYS,), tl.int64)
    for begin in range(block * BLOCK, vocab_size, blocks * BLOCK):
        x = _load(logits_ptr + row * stride, begin + tl.arange(0, BLOCK), vocab_size, 1.0, least)
        part = (_ordered(x) - low).to(tl.uint32, bitcast=True) >> shift
        inside = part < WAYS
        # Most blocks have no token in the range once it is small.
        if tl.max(inside.to(tl.int32), 0) > 0:
            weight = (tl.exp((x - highest) / temperature) * (1 << WEIGHT_BITS)).to(tl.int64)
            weight = tl.where(inside, weight, 0)
            sums += tl.sum(tl.where(part[None, :] >= way[:, None].to(tl.uint32), weight[None, :], 0), 1)
    tl.atomic_add(sums_ptr + row * WAYS + way, sums)


@triton.jit
def _threshold_kernel(sums_ptr, range_ptr, thresholds_ptr, top_p_ptr, WAYS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    threshold, _, _ = _narrowed(sums_ptr, range_ptr, top_p_ptr, row, 0, WAYS)
    tl.store(thresholds_ptr + row, threshold.to(tl.int32))


@triton.jit
def _first_above(weights, numbers, target):
    """Return the first number with weight whose cumulative sum is above the target, else the last one with weight.

    Sums round differently at each place of a scan: they can rise at a number without weight, and end below the target.
    """
    last = tl.max(tl.where(weights > 0.0, numbers, 0), 0)
    return tl.min(tl.where((weights > 0.0) & (tl.cumsum(weights, 0) > target), numbers, last), 0)


@triton.jit
def _choice_kernel(
    logits_ptr, least_ptr, stats_ptr, kept_stats_ptr, uniforms_ptr, normalizers_ptr, tokens_ptr, log_probs_ptr,
    stride, vocab_size, blocks, temperature,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TRUNCATED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block_number = tl.arange(0, BLOCKS)
    highest, all_weights = _row_statistics(stats_ptr, row, blocks, BLOCKS)
    _, weights = _row_statistics(kept_stats_ptr, row, blocks, BLOCKS)
    target = tl.load(uniforms_ptr + row) * tl.sum(weights, 0)
    if SHARED:
        normalizer = tl.load(normalizers_ptr + row)
    else:
        normalizer = highest + tl.log(tl.sum(all_weights, 0))
    block = _first_above(weights, block_number, target)
    remainder = target - tl.sum(tl.where(block_number < block, weights, 0.0), 0)
    inside = tl.arange(0, BLOCK)
    least = tl.load(least_ptr + row) if TRUNCATED else float("-inf")
    x = _load(logits_ptr + row * stride, block * BLOCK + inside, vocab_size, temperature, least)
    token = _first_above(tl.exp(x - highest), inside, remainder)
    chosen = tl.sum(tl.where(inside == token, x, 0.0), 0)
    tl.store(tokens_ptr + row, tl.minimum(block * BLOCK + token, vocab_size - 1).to(tl.int64))
    tl.store(log_probs_ptr + row, chosen - normalizer)


@triton.jit
def _bits_kernel(
    logits_ptr, least_ptr, bits_ptr, stride, vocab_size, words, offset, BLOCK: tl.constexpr, TRUNCATED: tl.constexpr
):
    """Write the bits of the kept tokens: bit j of word w is token 32 w + j - offset."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    least = tl.load(least_ptr + row) if TRUNCATED else float("-inf")
    at = block * BLOCK + tl.arange(0, BLOCK) - offset
    x = tl.load(logits_ptr + row * stride + at, mask=(at >= 0) & (at < vocab_size), other=float("-inf"))
    kept = ((x > float("-inf")) & ~(x < least)).to(tl.int32).reshape(BLOCK // 32, 32) << tl.arange(0, 32)[None, :]
    word = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    tl.store(bits_ptr + row * words + word, tl.sum(kept, 1), mask=word < words)


@on_its_device
def top_p_threshold(
    logits_NV: Tensor,
    highest_N: Tensor,
    least_N: Tensor,
    temperature: float,
    top_p: float,
    add: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the largest threshold `[N]` int32 whose tokens have at least `top_p` of the weight of all tokens.

    A token has the weight 2^40 exp((logit - highest) / temperature), rounded down, and 0 below the logit `least`. The
    threshold is in the order of the floats with these bits. For fp32 logits that are contiguous.

    Args:
        add: Adds the weights `[N * 4]` or `[N * 16]` int64 of a round over the ranks that hold parts of the vocabulary.
    """
    num, vocab_size = logits_NV.shape
    thresholds = logits_NV.new_empty(num, dtype=torch.int32)
    if not num:
        return thresholds
    blocks = min(cdiv(vocab_size, _SEARCH_BLOCK), cdiv(_PROGRAMS, num))
    # Triton takes numbers in fp32.
    top_p_1 = logits_NV.new_full((1,), top_p, dtype=torch.float64)
    ranges = logits_NV.new_empty(len(_ROUNDS), num, 3, dtype=torch.int64)
    all_ways = [1 << bits for bits in _ROUNDS]
    zeros = logits_NV.new_zeros(num * sum(all_ways), dtype=torch.int64).split([num * ways for ways in all_ways])
    sums, last, last_shift, shift = zeros[0], 0, 0, 32
    for number, ways in enumerate(all_ways):
        shift -= _ROUNDS[number]
        _search_kernel[(num, blocks)](
            logits_NV, highest_N, least_N, sums, ranges[last], zeros[number], ranges[number], top_p_1,
            logits_NV.stride(0), vocab_size, temperature, last_shift, shift, WAYS=ways, LAST_WAYS=all_ways[last],
            FIRST=number == 0, BLOCK=_SEARCH_BLOCK, WEIGHT_BITS=WEIGHT_BITS, num_warps=1,
        )  # fmt: skip
        sums, last, last_shift = add(zeros[number]), number, shift
    _threshold_kernel[(num,)](sums, ranges[last], thresholds, top_p_1, WAYS=all_ways[last], num_warps=1)
    return thresholds


@on_its_device
def draw_tokens(
    logits_NV: Tensor,
    uniforms_N: Tensor,
    temperature: float,
    least_N: Tensor | None = None,
    among_kept: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return tokens `[N]` int64 with at least the logit `least`, and their log-probs `[N]`, for contiguous fp32 logits.

    The log-probs are those before the truncation, or with `among_kept` those among the kept tokens.
    """
    tokens, log_probs = logits_NV.new_empty(len(logits_NV), dtype=torch.int64), logits_NV.new_empty(len(logits_NV))
    if len(logits_NV):
        kept_stats = stats = _statistics(logits_NV, temperature, least_N)
        if least_N is not None and not among_kept:
            stats = _statistics(logits_NV, temperature, None)
        _choose(logits_NV, stats, kept_stats, uniforms_N, None, least_N, temperature, tokens, log_probs)
    return tokens, log_probs


@on_its_device
def row_statistics(
    logits_NV: Tensor, temperature: float, least_N: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the statistics of blocks for `draw_from_share`, and each row's maximum and sum of exponentials `[N]`.

    The sum is relative to the maximum; 0 for -inf alone. Only logits of at least `least` count.
    """
    stats = _statistics(logits_NV, temperature, least_N)
    maxima, sums = stats.unbind(-1)
    highest = maxima.amax(-1)
    # A block of -inf alone has the sum 0, or NaN.
    sums = torch.where(maxima == -torch.inf, sums, sums * (maxima - highest[:, None]).exp())
    return stats, highest, sums.sum(-1)


@on_its_device
def draw_from_share(
    logits_NV: Tensor,
    stats: Tensor,
    uniforms_N: Tensor,
    normalizers_N: Tensor,
    temperature: float,
    least_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the token in which the cumulative distribution passes a number, and the logit less the normalizer.

    `[N]` each, for logits and statistics of `row_statistics`.
    """
    tokens, log_probs = logits_NV.new_empty(len(logits_NV), dtype=torch.int64), logits_NV.new_empty(len(logits_NV))
    if len(logits_NV):
        _choose(logits_NV, stats, stats, uniforms_N, normalizers_N, least_N, temperature, tokens, log_probs)
    return tokens, log_probs


@on_its_device
def bits_of_kept(logits_NV: Tensor, least_N: Tensor | None, offset: int, words: int) -> Tensor:
    """Return the bits `[N, words]` int32 of the finite logits of at least `least`, for contiguous fp32 logits.

    Bit j of word w is column 32 w + j - offset.
    """
    num, vocab_size = logits_NV.shape
    bits = logits_NV.new_empty(num, words, dtype=torch.int32)
    if num:
        _bits_kernel[(num, cdiv(words * 32, _BLOCK))](
            logits_NV, bits if least_N is None else least_N, bits, logits_NV.stride(0), vocab_size, words, offset,
            BLOCK=_BLOCK, TRUNCATED=least_N is not None, num_warps=8,
        )  # fmt: skip
    return bits


def _statistics(logits_NV: Tensor, temperature: float, least_N: Tensor | None) -> Tensor:
    """Return the maximum and the sum of exponentials of each block, `[N, J, 2]`."""
    num, vocab_size = logits_NV.shape
    stats = logits_NV.new_empty(num, cdiv(vocab_size, _BLOCK), 2)
    if num:
        _statistics_kernel[stats.shape[:2]](
            logits_NV, stats if least_N is None else least_N, stats, logits_NV.stride(0), vocab_size, temperature,
            BLOCK=_BLOCK, TRUNCATED=least_N is not None, num_warps=8,
        )  # fmt: skip
    return stats


def _choose(
    logits_NV: Tensor,
    stats: Tensor,
    kept_stats: Tensor,
    uniforms_N: Tensor,
    normalizers_N: Tensor | None,
    least_N: Tensor | None,
    temperature: float,
    tokens_N: Tensor,
    log_probs_N: Tensor,
) -> None:
    """Write tokens and log-probs. The normalizers are those of the row, or given."""
    blocks = stats.shape[1]
    _choice_kernel[tokens_N.shape](
        logits_NV, log_probs_N if least_N is None else least_N, stats, kept_stats, uniforms_N.contiguous(),
        log_probs_N if normalizers_N is None else normalizers_N, tokens_N, log_probs_N, logits_NV.stride(0),
        logits_NV.shape[1], blocks, temperature, BLOCK=_BLOCK, BLOCKS=next_power_of_2(blocks),
        TRUNCATED=least_N is not None, SHARED=normalizers_N is not None, num_warps=8,
    )  # fmt: skip
