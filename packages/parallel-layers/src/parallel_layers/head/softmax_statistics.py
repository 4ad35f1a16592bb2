"""Softmax statistics that can be computed piece by piece and merged: the heart of every loss over a sharded vocabulary.

For a token with logits z over a set of vocabulary entries, four numbers are kept (rows of a `[4, T]` tensor):

    m = max_j z_j        s = sum_j e^(z_j - m)        u = sum_j (z_j - m) e^(z_j - m)        t = z_label

From the statistics of the whole vocabulary follow, with p = softmax(z),

    logsumexp(z) = m + log s        log p_label = t - logsumexp        entropy = -sum_j p_j log p_j = log s - u / s

The shifted u cancels less than `logsumexp - sum_j p_j z_j` does. Disjoint sets merge exactly (the online softmax of
Milakov & Gimelshein, arXiv:1805.02867, with the entropy's numerator carried along), so tiles of the vocabulary and
the ranks of a tensor-parallel group use one and the same `merge_statistics`. An empty set has m = -inf, s = u = t = 0.

Shape suffixes: T tokens, V vocabulary entries at hand, N sets to merge.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

NEGLIGIBLE = -1e4
"""Log-probabilities are clamped here before they multiply their probability: e^-10000 is 0 in every dtype, and 0 * -inf
would be NaN where the limit of x e^x is 0."""


def tile_statistics(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Statistics `[4, T]` of one tile of logits; `labels_T` counts from its first entry, a label outside has t = 0.

    Logits of -inf are entries of probability zero.
    """
    num_tokens, num_entries = logits_TV.shape
    statistics = logits_TV.new_zeros(4, num_tokens)
    if num_entries == 0:
        statistics[0] = -math.inf
        return statistics
    maximum = logits_TV.amax(dim=-1)
    # A tile of -inf alone: any finite shift gives s = u = 0.
    shift = maximum.masked_fill(maximum == -math.inf, 0.0)
    shifted = logits_TV - shift[:, None]
    weights = shifted.exp()
    statistics[0] = maximum
    torch.sum(weights, dim=-1, out=statistics[1])
    torch.sum(weights.mul_(shifted.clamp_(min=NEGLIGIBLE)), dim=-1, out=statistics[2])
    inside = (labels_T >= 0) & (labels_T < num_entries)
    label_logits = logits_TV.gather(-1, labels_T.clamp(0, num_entries - 1)[:, None])[:, 0]
    statistics[3] = torch.where(inside, label_logits, 0.0)
    return statistics


def merge_statistics(parts_N4T: Tensor) -> Tensor:
    """Merge the statistics of N disjoint sets, in order, into those of their union: `[N, 4, T] -> [4, T]`."""
    maxima, sums, moments, label_logits = parts_N4T.unbind(dim=1)
    maximum = maxima.amax(dim=0)
    # Sets without weight (empty, or -inf alone) must not turn 0 * -inf into NaN.
    shifts = torch.where(maxima == -math.inf, 0.0, maxima - maximum)
    factors = torch.where(maxima == -math.inf, 0.0, shifts.exp())
    return torch.stack(
        (
            maximum,
            (sums * factors).sum(dim=0),
            ((moments + shifts * sums) * factors).sum(dim=0),
            label_logits.sum(dim=0),
        )
    )


def finish_statistics(statistics_4T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(log_probs, logsumexp, entropy)`, each `[T]`, of the whole vocabulary's statistics."""
    maximum, total, moment, label_logit = statistics_4T.unbind(dim=0)
    log_total = total.log()
    # (t - m) first: both are logits, their difference is small and exact where the sum m + log s would round.
    return (label_logit - maximum) - log_total, maximum + log_total, log_total - moment / total


class UpstreamGradients(NamedTuple):
    """What the gradient of the logits is made of, each `[T]`: upstream gradients, and what the forward saved.

    `label` multiplies `1[j = label]` and `probability` multiplies `-p_j`: both are the log-prob's upstream gradient.
    `entropy` is the entropy's, or None when nothing was computed from it; then `entropies` may be None, too.
    """

    label: Tensor
    probability: Tensor
    entropy: Tensor | None
    logsumexps: Tensor
    entropies: Tensor | None

    @classmethod
    def of_log_probs(
        cls, log_prob: Tensor, entropy: Tensor | None, logsumexps: Tensor, entropies: Tensor | None
    ) -> "UpstreamGradients":
        """Upstream gradients of log-probs (already zero where the label is ignored) and entropies alone."""
        return cls(log_prob, log_prob, entropy, logsumexps, entropies)


def logit_gradient(logits_TV: Tensor, labels_T: Tensor, upstream: UpstreamGradients, tokens: slice) -> Tensor:
    """`dz_j = g_lp (1[j = label] - p_j) - g_H p_j (z_j - logsumexp + H)` for one tile, overwriting the logits.

    `labels_T` counts from the tile's first entry; a label outside the tile has no entry here.
    """
    num_entries = logits_TV.shape[1]
    log_probs_TV = logits_TV.sub_(upstream.logsumexps[tokens, None])
    gradient_TV = log_probs_TV.exp()
    probability = upstream.probability[tokens, None]
    if upstream.entropy is None:
        gradient_TV.mul_(-probability)
    else:
        assert upstream.entropies is not None
        factor_TV = log_probs_TV.clamp_(min=NEGLIGIBLE).add_(upstream.entropies[tokens, None])
        gradient_TV.mul_(factor_TV.mul_(-upstream.entropy[tokens, None]).sub_(probability))
    if num_entries:
        inside = (labels_T >= 0) & (labels_T < num_entries)
        column = labels_T.clamp(0, num_entries - 1)[:, None]
        gradient_TV.scatter_add_(1, column, torch.where(inside, upstream.label[tokens], 0.0)[:, None])
    return gradient_TV
