"""Draws from logits that the ranks of a group hold by parts of the vocabulary, without gathering them.

The ranks exchange the maximum and the sum of exponentials of each row. Every rank then knows whose part its number
falls into; that rank finds the token, and a sum over the ranks brings it to all. So the cumulative distribution is
inverted in the order of the vocabulary, as on one rank. All ranks compute from the same exchanged bits.

Shape legend: N rows, P tokens of this rank's part of the vocabulary, R ranks, k candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives


class Share(NamedTuple):
    """One rank's part in the draw of each row, three tensors `[N]`.

    Attributes:
        is_drawn: The token is in this rank's part.
        target: The number that the cumulative sum of exponentials of this part is to pass, relative to its maximum.
        normalizer: The logarithm of the sum of exponentials of all parts.
    """

    is_drawn: Tensor
    target: Tensor
    normalizer: Tensor


def share_of(highest_N: Tensor, total_N: Tensor, uniforms_N: Tensor, group: ProcessGroup) -> Share:
    """Return this rank's share of each draw, from the maxima and sums of exponentials of its part.

    The sum is relative to the maximum, and 0 for a part of -inf alone. Communication: an all-gather `[N, 2]`.
    """
    both_N2 = torch.stack((highest_N, total_N), dim=1)
    maxima_RN, sums_RN = async_collectives.all_gather(both_N2[None], group).unbind(-1)
    largest_N = maxima_RN.amax(0)
    # A part of -inf alone has no exponentials.
    weights_RN = torch.where(maxima_RN == -torch.inf, sums_RN, sums_RN * (maxima_RN - largest_N).exp())
    passed_RN = weights_RN.cumsum(0)
    target_N = uniforms_N.to(passed_RN.dtype) * passed_RN[-1]
    # Rounding may leave the last cumulative sum below the target: take the last part that has weight.
    ranks = torch.arange(group.size(), device=target_N.device)[:, None]
    last = torch.where(weights_RN > 0, ranks, 0).amax(0)
    owner = torch.minimum((passed_RN <= target_N).sum(0), last)[None]
    rest_N = (target_N - (passed_RN - weights_RN).gather(0, owner)[0]) * (largest_N - highest_N).exp()
    return Share(owner[0] == group.rank(), rest_N, largest_N + passed_RN[-1].log())


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


def most_likely(logits_NP: Tensor, count: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the `count` largest logits of all ranks in descending order, and their tokens: `[N, k]` each.

    Communication: two all-gathers `[N, k]` of each rank's own candidates.
    """
    part = logits_NP.shape[1]
    values, tokens = logits_NP.topk(min(count, part), dim=-1)
    values = async_collectives.all_gather(values, group, -1)
    tokens = async_collectives.all_gather(tokens + group.rank() * part, group, -1)
    ordered, places = values.topk(min(count, values.shape[1]), dim=-1)
    return ordered, tokens.gather(-1, places)
