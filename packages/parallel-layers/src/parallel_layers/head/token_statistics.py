"""Statistics of each token from the pass of its log-prob: its rank, and the most likely tokens in its place.

Shape suffixes: T tokens, H hidden, V this rank's rows of the head, N listed tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.head import chunked, fused, fused_ranking
from parallel_layers.head.arguments import check_head, check_labels, logit_transform
from parallel_layers.head.chunked import LogitTransform, finish_statistics, merge_statistics
from parallel_layers.head.sampling_mask import SamplingMask
from parallel_layers.head.top_entries import TopEntries, top_of
from parallel_layers.head.vocabulary import (
    IGNORE_INDEX,
    check_rows,
    check_token_ids,
    gather_rows,
    true_vocab_size,
    vocab_range,
)
from parallel_layers.module.autocast import as_operand, wide, without_autocast


class TokenStatistics(NamedTuple):
    """The log-prob of each label, and the distribution that the label belongs to; without gradients.

    Floating-point numbers are fp32 (fp64 for fp64 inputs).
    """

    log_probs: Tensor
    """`[T]`, the results of `linear_log_probs`."""
    entropy: Tensor
    """`[T]`, the results of `linear_log_probs`."""
    ranks: Tensor
    """`[T]` int64, 1 for the most likely token; 0 for ignored labels and log-probs of NaN. Of equally likely tokens the
    lowest id is first."""
    top_ids: Tensor
    """`[T, N]` int64, the most likely tokens in the order of the ranks; -1 where fewer tokens have a probability."""
    top_log_probs: Tensor
    """`[T, N]`, their log-probs; -inf for ids of -1."""

    @property
    def margin(self) -> Tensor:
        """`[T]`, the log-prob of the most likely token minus that of the second; infinite for a single token."""
        first, second = self.top_log_probs[:, :2].unbind(dim=1)
        return first - second

    def columns(self) -> Tensor:
        """Return all fields side by side, `[T, 3 + 2 N]` in the dtype of the log-probs; fp32 holds ids up to 2^24."""
        columns = [x if x.dim() > 1 else x[:, None] for x in self]
        return torch.cat([x.to(self.log_probs.dtype) for x in columns], dim=1)

    @classmethod
    def from_columns(cls, columns: Tensor) -> TokenStatistics:
        """Return the statistics that `columns` has put side by side."""
        top_n = (columns.shape[1] - 3) // 2
        log_probs, entropy, ranks, ids, top_log_probs = columns.split((1, 1, 1, top_n, top_n), dim=1)
        return cls(log_probs[:, 0], entropy[:, 0], ranks[:, 0].long(), ids.long(), top_log_probs)


@torch.no_grad()
def linear_token_statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    top_n: int = 20,
    group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    sampling_mask: SamplingMask | None = None,
) -> TokenStatistics:
    """Return the log-prob and the rank of each label, the entropy, and the N most likely tokens in its place.

    The logits are those of `linear_log_probs`, and are computed once, in tiles: nothing of `[T, V]` is in memory. With
    a sampling mask all results are of the distribution over the tokens that it keeps. A token with NaN among its
    logits has NaN for its log-probs.

    Communication: all-gather of the labels' logits `[T]`, and of 5 + 2 N numbers a token; sequence parallel: also of
    the hidden states.

    Args:
        hidden_TH, weight_VH, labels_T: As in `linear_log_probs`.
        top_n: N, from 1 to the size of the vocabulary.
        group, temperature, sequence_parallel, vocab_size, logit_scale, logit_softcap, sampling_mask: As in
            `linear_log_probs`.

    Returns:
        `TokenStatistics`, bitwise equal on all ranks.

    Raises:
        ValueError: As for `linear_log_probs`; or `top_n` is out of its range.
    """
    hidden_TH, weight_VH = as_operand(hidden_TH), as_operand(weight_VH)
    vocab_size = true_vocab_size(len(weight_VH), vocab_size, group)
    check_head(hidden_TH, weight_VH)
    check_rows(len(weight_VH), vocab_size, group, hidden_TH.device)
    if not 1 <= top_n <= vocab_size:
        raise ValueError(f"top_n={top_n} must be in 1..{vocab_size}, the size of the vocabulary")
    labels_T = check_labels(hidden_TH, labels_T, sampling_mask, vocab_size, group, sequence_parallel)
    check_token_ids(labels_T, vocab_size, ignore_index=IGNORE_INDEX)
    transform = logit_transform(temperature, logit_scale, logit_softcap, len(labels_T))
    return _statistics(
        hidden_TH, weight_VH, labels_T, transform, sampling_mask, vocab_size, top_n, group, sequence_parallel
    )


@without_autocast
def _statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    transform: LogitTransform,
    mask: SamplingMask | None,
    vocab_size: int,
    top_n: int,
    group: ProcessGroup | None,
    sequence_parallel: bool,
) -> TokenStatistics:
    first_entry, last_entry = vocab_range(vocab_size, group, len(weight_VH))
    hidden = gather_rows(hidden_TH, group) if sequence_parallel else hidden_TH
    weight, labels = weight_VH[: last_entry - first_entry], labels_T.long() - first_entry
    mask = None if mask is None else mask.shift(first_entry)
    by_kernels = fused.supports(hidden, weight) and top_n <= fused_ranking.MAX_TOP
    label_logits, local = (
        (fused_ranking.label_logits, fused_ranking.ranked_statistics)
        if by_kernels
        else (_label_logits, local_statistics)
    )
    of_labels = gather_rows(label_logits(hidden, weight, labels, transform)[None], group).sum(dim=0)
    statistics, larger, top = local(hidden, weight, labels, of_labels, transform, mask, top_n)
    top.ids.add_((top.ids >= 0) * first_entry)
    if async_collectives.is_sharded(group):
        # fp64 holds every fp32 number and every id.
        columns = torch.cat((statistics, larger[None], top.logits.T, top.ids.T)).double()
        of_ranks = gather_rows(columns[None], group)
        statistics = merge_statistics(of_ranks[:, :4].to(statistics.dtype))
        larger = of_ranks[:, 4].sum(dim=0).long()
        logits, ids = (x.permute(2, 0, 1).flatten(1) for x in of_ranks[:, 5:].split(top_n, dim=1))
        top = top_of(logits.to(statistics.dtype), top_n).select(ids.long())
    return _finished(statistics, larger, top, labels_T, mask, wide(hidden.dtype))


def _finished(
    statistics_4T: Tensor,
    larger_T: Tensor,
    top: TopEntries,
    labels_T: Tensor,
    mask: SamplingMask | None,
    dtype: torch.dtype,
) -> TokenStatistics:
    """Return the results from the statistics, the number of entries before each label, and the largest entries."""
    log_probs, entropy, logsumexp = (x.to(dtype) for x in finish_statistics(statistics_4T))
    if mask is not None:
        entropy = entropy.masked_fill(mask.counts == 0, 0.0)
        logsumexp = logsumexp.masked_fill(mask.counts == 0, 0.0)
    ignored = labels_T == IGNORE_INDEX
    # The label's own logit may be rounded otherwise than in its tile; its place in the list decides.
    is_label = top.ids == labels_T[:, None]
    number = torch.arange(1, top.ids.shape[1] + 1, device=top.ids.device)
    listed = torch.where(is_label, number, 0).sum(dim=1)
    ranks = 1 + torch.where(listed > 0, listed - 1, torch.maximum(larger_T, (top.ids >= 0).sum(dim=1)))
    return TokenStatistics(
        log_probs.masked_fill(ignored, 0.0),
        entropy,
        ranks.masked_fill(ignored | log_probs.isnan(), 0),
        top.ids,
        top.logits.to(dtype) - logsumexp[:, None],
    )


def _label_logits(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, transform: LogitTransform) -> Tensor:
    """Return each label's logit `[T]`, 0 for labels of other ranks; the labels count from this rank's first entry."""
    dtype, inside = wide(hidden_TH.dtype), (labels_T >= 0) & (labels_T < len(weight_VH))
    logits = hidden_TH.new_zeros(len(hidden_TH), dtype=dtype)
    if len(weight_VH):
        for tokens in chunked.token_runs(hidden_TH):
            rows = weight_VH[labels_T[tokens].clamp(0, len(weight_VH) - 1)].to(dtype)
            products = (hidden_TH[tokens].to(dtype) * rows).sum(dim=1, keepdim=True)
            logits[tokens] = transform.apply_(products, tokens)[0][:, 0]
    return logits.masked_fill_(~inside, 0.0)


def local_statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    label_logits_T: Tensor,
    transform: LogitTransform,
    mask: SamplingMask | None,
    top_n: int,
) -> tuple[Tensor, Tensor, TopEntries]:
    """Return the statistics `[4, T]` of this rank's entries, how many come before the label `[T]`, and the largest.

    Labels, the mask's ids, and the result's ids count from this rank's first entry.
    """
    statistics = chunked.empty_statistics(hidden_TH)
    larger = torch.zeros_like(labels_T)
    top = TopEntries.empty(len(hidden_TH), top_n, statistics)
    for tile in chunked.logit_tiles(hidden_TH, weight_VH, transform, mask):
        tokens, entries, logits, *_ = tile
        labels, threshold = (labels_T[tokens] - entries.start)[:, None], label_logits_T[tokens, None]
        columns = torch.arange(logits.shape[1], device=logits.device)
        before = (logits > threshold) & (columns != labels) | (logits == threshold) & (columns < labels)
        larger[tokens] += before.sum(dim=1)
        of_tile = top_of(logits, top_n)
        of_tile.ids.add_((of_tile.ids >= 0) * entries.start)
        top.of_tokens(tokens).update_(of_tile)
        chunked.merge_tile_(statistics, tile, labels_T)
    return statistics, larger, top
