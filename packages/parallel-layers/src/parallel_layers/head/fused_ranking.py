"""Ranks and the most likely tokens by the kernels of `fused`.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary, N tiles of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.head.chunked import LogitTransform
from parallel_layers.head.fused import (
    BLOCK_V,
    kernel_numbers,
    launch_label_logits,
    launch_statistics,
    mask_bits,
    mask_slices,
    readable,
)
from parallel_layers.head.sampling_mask import SamplingMask
from parallel_layers.head.top_entries import TopEntries
from parallel_layers.kernels.head_groups import GROUP_ENTRIES, group_logits
from parallel_layers.kernels.head_triton import OUTSIDE, merge_kernel
from parallel_layers.kernels.runtime import cdiv, on_its_device
from parallel_layers.kernels.top_k import top_k

MAX_TOP = 64
"""The longest list of likely tokens that the kernels compute."""


class Ranking(NamedTuple):
    """Tensors that the forward fills: the number of entries before each label, and the maxima of groups of entries."""

    labels: Tensor
    """`[T]` int64, counted from the tiles' first entry."""
    label_logits: Tensor
    """`[T]`, times log2 e."""
    larger: Tensor
    """`[N, T]` int32."""
    maxima: Tensor
    """`[T, groups]` fp32, the logits times log2 e."""


def label_logits(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, transform: LogitTransform) -> Tensor:
    """Return each label's logit times log2 e `[T]`, 0 for labels outside this rank's entries."""
    logits = torch.empty(2, len(hidden_TH), dtype=torch.float32, device=hidden_TH.device)
    launch_label_logits(readable(hidden_TH), readable(weight_VH), labels_T, transform, logits[0], logits[1])
    return logits[1]


@on_its_device
def ranked_statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    label_logits_T: Tensor,
    transform: LogitTransform,
    mask: SamplingMask | None,
    top_n: int,
) -> tuple[Tensor, Tensor, TopEntries]:
    """Compute `token_statistics.local_statistics` by kernels, with the label's logits of `label_logits`.

    The n largest logits of a token are in the n groups with the largest maxima, whose logits are computed once more.
    """
    hidden, weight = readable(hidden_TH), readable(weight_VH)
    num_tokens, num_entries = len(hidden), len(weight)
    numbers, inverse_temperatures = kernel_numbers(transform)
    statistics = torch.empty(4, num_tokens, dtype=torch.float32, device=hidden.device)
    tiles = statistics.new_empty(cdiv(num_entries, BLOCK_V), 3, num_tokens)
    larger = torch.empty(len(tiles), num_tokens, dtype=torch.int32, device=hidden.device)
    logits, ids = [], []
    for entries in mask_slices(mask, num_tokens, num_entries):
        bits, tile, rows = mask_bits(mask, entries), entries.start // BLOCK_V, weight[entries]
        maxima = statistics.new_empty(num_tokens, cdiv(len(rows), BLOCK_V) * (BLOCK_V // GROUP_ENTRIES))
        ranking = Ranking(labels_T - entries.start, label_logits_T, larger[tile:], maxima)
        launch_statistics(hidden, rows, transform, bits, tiles[tile:], ranking=ranking)
        # In the order of the entries, so that of equal logits the first one has the lowest id.
        groups = top_k(maxima, min(top_n, cdiv(len(rows), GROUP_ENTRIES))).sort(dim=1).values
        candidates = group_logits(hidden, rows, groups, bits, inverse_temperatures, numbers, BLOCK_V)
        columns = top_k(candidates, min(top_n, candidates.shape[1]))
        logits.append(candidates.gather(1, columns))
        numbers_of_groups = groups.gather(1, columns // GROUP_ENTRIES)
        ids.append(numbers_of_groups * GROUP_ENTRIES + columns % GROUP_ENTRIES + entries.start)
    merge_kernel[(cdiv(num_tokens, 32),)](tiles, statistics, len(tiles), num_tokens, BT=32, BN=64)
    launch_label_logits(hidden, weight, labels_T, transform, statistics[3])
    return statistics, larger.sum(dim=0), _largest(logits, ids, top_n)


def _largest(slices: list[Tensor], ids_of_slices: list[Tensor], top_n: int) -> TopEntries:
    """Return the largest of the slices' entries, each sorted, as natural logits, filled up to n."""
    log2_logits, ids = torch.cat(slices, dim=1), torch.cat(ids_of_slices, dim=1)
    if len(slices) > 1:
        columns = top_k(log2_logits, min(top_n, log2_logits.shape[1]))
        log2_logits, ids = log2_logits.gather(1, columns), ids.gather(1, columns)
    logits, has_entry = log2_logits * math.log(2.0), log2_logits > 0.5 * OUTSIDE.value
    top = TopEntries.empty(len(ids), top_n, logits)
    top.logits[:, : ids.shape[1]] = logits.masked_fill(~has_entry, -math.inf)
    top.ids[:, : ids.shape[1]] = ids.masked_fill(~has_entry, -1)
    return top
