"""Draws from logits that the ranks of a group hold by parts of the vocabulary, without gathering them.

The ranks exchange the maximum and the sum of exponentials of each row. Every rank then knows whose part its number
falls into; that rank finds the token, and a sum over the ranks brings it to all. So the cumulative distribution is
inverted in the order of the vocabulary, as on one rank. All ranks compute from the same exchanged bits.

Shape legend: N rows, P tokens of this rank's part of the vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed import async_collectives


class Share(NamedTuple):
    """One rank's part in the draw of each row, three tensors `[N]`.

    Attributes:
        is_drawn: The token is in this rank's part.
        uniform: The number in [0, 1) that decides inside this part.
        normalizer: The logarithm of the sum of exponentials of all parts.
    """

    is_drawn: Tensor
    uniform: Tensor
    normalizer: Tensor


def share_of(
    highest_N: Tensor, total_N: Tensor, kept_N: Tensor, uniforms_N: Tensor | None, group: ProcessGroup
) -> Share:
    """Return this rank's share of each draw.

    Communication: an all-gather `[N, 2]`, or `[N, 3]` where not all tokens are kept.

    Args:
        highest_N: The largest logit of this part.
        total_N: The sum of exponentials of this part, relative to the largest logit; 0 for a part of -inf alone.
        kept_N: The sum over the tokens that may be drawn; `total_N` itself: all.
        uniforms_N: The numbers that decide; None: the most likely token.
    """
    sums = (total_N,) if kept_N is total_N else (total_N, kept_N)
    maxima_RN, *sums_RN = async_collectives.all_gather(torch.stack((highest_N, *sums), 1)[None], group).unbind(-1)
    largest_N = maxima_RN.amax(0)
    factor_RN = (maxima_RN - largest_N).exp()
    normalizer_N = largest_N + (sums_RN[0] * factor_RN).cumsum(0)[-1].log()
    if uniforms_N is None:
        return Share(maxima_RN.argmax(0) == group.rank(), normalizer_N, normalizer_N)
    weights_RN = sums_RN[-1] * factor_RN
    passed_RN = weights_RN.cumsum(0)
    target_N = uniforms_N * passed_RN[-1]
    # Rounding may leave the last cumulative sum below the target: take the last part that has weight.
    ranks = torch.arange(group.size(), device=target_N.device)[:, None]
    last = torch.where(weights_RN > 0, ranks, 0).amax(0)
    owner = torch.minimum((passed_RN <= target_N).sum(0), last)[None]
    before_N, weight_N = (x.gather(0, owner)[0] for x in (passed_RN - weights_RN, weights_RN))
    # Rounding may leave the number outside of the part, too.
    inside_N = ((target_N - before_N) / weight_N).clamp(0, 1 - torch.finfo(target_N.dtype).eps / 2)
    return Share(owner[0] == group.rank(), inside_N, normalizer_N)


def from_owner(
    share: Share, tokens_N: Tensor, log_probs_N: Tensor, group: ProcessGroup, part: int
) -> tuple[Tensor, Tensor]:
    """Return tokens `[N]` int64 and log-probs `[N]` on every rank, from the rank that has drawn each.

    `tokens_N` count from the beginning of this rank's part of `part` tokens. Communication: an all-reduce `[N, 2]`.
    """
    tokens_N = tokens_N + group.rank() * part
    both_N2 = torch.stack((tokens_N.double(), log_probs_N.double()), dim=1)
    drawn_N2 = torch.where(share.is_drawn[:, None], both_N2, 0)
    tokens, log_probs = async_collectives.all_reduce(drawn_N2, group).unbind(1)
    return tokens.long(), log_probs.float()


def statistics(logits_NP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each row, and the sum of exponentials relative to it; 0 for -inf alone: `[N]` each."""
    highest_N = logits_NP.amax(-1)
    exponentials = (logits_NP - highest_N[:, None]).exp()
    return highest_N, exponentials.masked_fill((logits_NP == -torch.inf) & (highest_N == -torch.inf)[:, None], 0).sum(
        -1
    )


def packed_bits(kept_NP: Tensor, offset: int, words: int) -> Tensor:
    """Return the bits `[N, words]` int32 of a mask: bit j of word w is column 32 w + j - offset."""
    width = 32 * words
    padded = F.pad(kept_NP, (offset, width - offset - kept_NP.shape[1])).unflatten(1, (-1, 8)).to(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=padded.device)
    return (padded << shifts).sum(-1, dtype=torch.uint8).view(torch.int32)


def joined_bits(bits_of: Callable[[int, int], Tensor], group: ProcessGroup, part: int) -> Tensor:
    """Return the bits of all ranks' parts, of `part` tokens each: `[N, ceil(R part / 32)]` int32.

    `bits_of(offset, words)` returns the bits of this rank's part, behind `offset` bits that are 0. Communication: an
    all-gather of these bits.
    """
    starts = [rank * part for rank in range(group.size())]
    words, total = -(-(part + 31) // 32), -(-(group.size() * part) // 32)
    rows = async_collectives.all_gather(bits_of(starts[group.rank()] % 32, words)[None], group)
    joined = rows.new_zeros(rows.shape[1], total + words)
    for start, bits in zip(starts, rows, strict=True):
        joined[:, start // 32 : start // 32 + words] |= bits
    return joined[:, :total]
