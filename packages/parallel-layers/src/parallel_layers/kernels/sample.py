"""Draw a token of each row of logits, and its log-prob, by two passes over the logits.

The first kernel keeps the maximum and the sum of exponentials of each block of the vocabulary. The second finds the
block in which the cumulative sum passes the row's number, and reads that block alone.

A third kernel adds the weights of the tokens above thresholds, for the search of `inference.truncation`.

Shape legend: N rows, V vocabulary, J blocks of the vocabulary.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton

_BLOCK = 2048
# Thresholds that one pass over the logits tries.
WAYS = 16
# The likeliest token has the weight 2^40 in a search for a threshold.
WEIGHT_BITS = 40
_SEARCH_BLOCK = 512
# Programs that fill a GPU.
_PROGRAMS = 2048


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
def _weights_above_kernel(
    logits_ptr, highest_ptr, least_ptr, low_ptr, weights_ptr, stride, vocab_size, temperature, shift,
    WAYS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT_BITS: tl.constexpr,
):  # fmt: skip
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    highest, least, low = tl.load(highest_ptr + row), tl.load(least_ptr + row), tl.load(low_ptr + row)
    way = tl.arange(0, WAYS)
    tried = low + (way << shift)
    above, inside = tl.zeros((BLOCK,), tl.int64), tl.zeros((WAYS, BLOCK), tl.int64)
    for begin in range(block * BLOCK, vocab_size, blocks * BLOCK):
        x = _load(logits_ptr + row * stride, begin + tl.arange(0, BLOCK), vocab_size, 1.0, least)
        weight = (tl.exp((x - highest) / temperature) * (1 << WEIGHT_BITS)).to(tl.int64)
        weight = tl.where(x > float("-inf"), weight, 0)
        key = _ordered(x)
        # Most blocks have no token between the thresholds once these are close.
        last = low + ((WAYS - 1) << shift)
        above += tl.where(key >= last, weight, 0)
        if tl.max(((key >= low) & (key < last)).to(tl.int32), 0) > 0:
            weight = tl.where(key < last, weight, 0)
            inside += tl.where(key[None, :] >= tried[:, None], weight[None, :], 0)
    tl.atomic_add(weights_ptr + row * WAYS + way, tl.sum(inside, 1) + tl.sum(above, 0))


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
def weights_above(
    logits_NV: Tensor, highest_N: Tensor, least_N: Tensor, low_N: Tensor, shift: int, temperature: float
) -> Tensor:
    """Return the weight `[N, 16]` int64 of the tokens from each threshold `low + (w << shift)` on.

    A token has the weight 2^40 exp((logit - highest) / temperature), rounded down, and 0 below the logit `least`.
    Thresholds are int32 in the order of the floats with these bits. For fp32 logits that are contiguous.
    """
    num, vocab_size = logits_NV.shape
    weights = logits_NV.new_zeros(num, WAYS, dtype=torch.int64)
    if num:
        blocks = min(cdiv(vocab_size, _SEARCH_BLOCK), cdiv(_PROGRAMS, num))
        _weights_above_kernel[(num, blocks)](
            logits_NV, highest_N, least_N, low_N, weights, logits_NV.stride(0), vocab_size, temperature, shift,
            WAYS=WAYS, BLOCK=_SEARCH_BLOCK, WEIGHT_BITS=WEIGHT_BITS, num_warps=8,
        )  # fmt: skip
    return weights


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
