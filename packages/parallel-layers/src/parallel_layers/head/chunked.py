"""The head in tiles of plain torch, for every device; the reference for the CUDA kernels of `fused`.

The statistics of a token with logits z over a set of entries are four numbers (rows of a `[4, T]` tensor):

    m = max_j z_j        s = sum_j e^(z_j - m)        u = sum_j (z_j - m) e^(z_j - m)        t = z_label

From the statistics of the whole vocabulary follow, with p = softmax(z),

    logsumexp(z) = m + log s        log p_label = t - logsumexp        entropy = -sum_j p_j log p_j = log s - u / s

The shifted u loses less to cancellation than `logsumexp - sum_j p_j z_j`. Statistics of disjoint sets merge exactly
(online softmax, Milakov & Gimelshein, arXiv:1805.02867, extended by u), both over tiles and over ranks. An empty set
has m = -inf, s = u = t = 0.

`head_statistics` walks the vocabulary and keeps the statistics. `head_gradients` recomputes the logits one slice of the
vocabulary at a time. Temporaries have at most `TILE_ELEMENTS` elements, except one copy of the hidden states in the
dtype of the GEMMs.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary, N sets to merge.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.device.names import GPU
from parallel_layers.head.sampling_mask import SamplingMask
from parallel_layers.kernels.runtime import device_type
from parallel_layers.module.autocast import wide

TILE_ELEMENTS = {"cpu": 1 << 21, GPU: 1 << 25}
"""Largest temporary of a tile, in elements, by device type; other devices take the CUDA value."""

_VOCABULARY_SLICE = 8192


NEGLIGIBLE = -1e4
"""Least log-probability that multiplies its probability: e^-10000 is 0 in every dtype, while 0 * -inf would be NaN."""


class LogitTransform(NamedTuple):
    """The map `z = softcap * tanh(scale * raw / softcap) / temperature`, without the tanh if `softcap` is 0.

    `temperature` is a number or a tensor `[T]`, and gets no gradient.
    """

    scale: float = 1.0
    softcap: float = 0.0
    temperature: float | Tensor = 1.0

    def apply_(self, raw_TV: Tensor, tokens: slice) -> tuple[Tensor, Tensor | float]:
        """Turn a tile of raw dot products of `tokens` into logits, in place; return them and the derivative dz / draw.

        The derivative is a number, a `[T, 1]` column, or (with a soft-cap) a tile.
        """
        logits_TV = raw_TV
        derivative: Tensor | float = self.scale
        if self.softcap:
            tanh_TV = raw_TV.mul_(self.scale / self.softcap).tanh_()
            unit = torch.ones((), dtype=raw_TV.dtype, device=raw_TV.device)
            derivative = torch.addcmul(unit, tanh_TV, tanh_TV, value=-1.0).mul_(self.scale)
            logits_TV = tanh_TV.mul_(self.softcap)
        elif self.scale != 1.0:
            logits_TV = raw_TV.mul_(self.scale)
        if isinstance(self.temperature, Tensor):
            inverse: Tensor | float = self.temperature[tokens].to(raw_TV.dtype).reciprocal()[:, None]
        elif self.temperature != 1.0:
            inverse = 1.0 / self.temperature
        else:
            return logits_TV, derivative
        return logits_TV.mul_(inverse), derivative * inverse


class UpstreamGradients(NamedTuple):
    """Upstream gradients and saved results that determine the gradient of the logits, each `[T]`.

    `log_probs` is 0 for ignored labels. `entropy` is None if the entropy has no gradient.
    """

    log_probs: Tensor
    entropy: Tensor | None
    logsumexps: Tensor
    entropies: Tensor


def tile_statistics(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return the statistics `[4, T]` of one tile of logits; entries of -inf have probability zero.

    `labels_T` counts from the tile's first entry; a label outside the tile gives t = 0.
    """
    num_tokens, num_entries = logits_TV.shape
    statistics = logits_TV.new_zeros(4, num_tokens)
    if num_entries == 0:
        statistics[0] = -math.inf
        return statistics
    maximum = logits_TV.amax(dim=-1)
    # In a tile of -inf alone any finite shift gives s = u = 0.
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
    """Merge the statistics of N disjoint sets, in order, into their union's statistics: `[N, 4, T] -> [4, T]`."""
    maxima, sums, moments, label_logits = parts_N4T.unbind(dim=1)
    maximum = maxima.amax(dim=0)
    # For sets without weight (empty, or -inf alone) 0 * -inf would be NaN.
    shifts = torch.where(maxima == -math.inf, 0.0, maxima - maximum)
    factors = torch.where(maxima == -math.inf, 0.0, shifts.exp())
    total = (sums * factors).sum(dim=0)
    moment = ((moments + shifts * sums) * factors).sum(dim=0)
    return torch.stack((maximum, total, moment, label_logits.sum(dim=0)))


def finish_statistics(statistics_4T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(log_probs, entropy, logsumexp)`, each `[T]`, from the statistics of the whole vocabulary."""
    maximum, total, moment, label_logit = statistics_4T.unbind(dim=0)
    log_total = total.log()
    # (t - m) first: the difference of two logits is exact where the sum m + log s would round.
    return (label_logit - maximum) - log_total, log_total - moment / total, maximum + log_total


def logit_gradient(logits_TV: Tensor, labels_T: Tensor, upstream: UpstreamGradients, tokens: slice) -> Tensor:
    """Return `dz_j = g_lp (1[j = label] - p_j) - g_H p_j (z_j - logsumexp + H)` of one tile; overwrites the logits.

    `labels_T` counts from the tile's first entry; labels outside the tile are ignored.
    """
    num_entries = logits_TV.shape[1]
    log_probs_TV = logits_TV.sub_(upstream.logsumexps[tokens, None])
    gradient_TV = log_probs_TV.exp()
    grad_log_probs = upstream.log_probs[tokens]
    if upstream.entropy is None:
        gradient_TV.mul_(-grad_log_probs[:, None])
    else:
        factor_TV = log_probs_TV.clamp_(min=NEGLIGIBLE).add_(upstream.entropies[tokens, None])
        gradient_TV.mul_(factor_TV.mul_(-upstream.entropy[tokens, None]).sub_(grad_log_probs[:, None]))
    if num_entries:
        inside = (labels_T >= 0) & (labels_T < num_entries)
        column = labels_T.clamp(0, num_entries - 1)[:, None]
        gradient_TV.scatter_add_(1, column, torch.where(inside, grad_log_probs, 0.0)[:, None])
    return gradient_TV


def runs(length: int, step: int) -> Iterator[slice]:
    """Cut `length` rows into runs of at most `step`; at least one run, which may be empty."""
    for start in range(0, max(length, 1), step):
        yield slice(start, start + step)


class LogitTile(NamedTuple):
    """The logits `[t, v]` of some tokens and entries, and the GEMM's rows of the head, `[v, H]`."""

    tokens: slice
    entries: slice
    logits: Tensor
    derivative: Tensor | float
    """The derivative of the logits by the raw dot products."""
    hidden: Tensor
    weight: Tensor


def logit_tiles(
    hidden_TH: Tensor, weight_VH: Tensor, transform: LogitTransform, mask: SamplingMask | None
) -> Iterator[LogitTile]:
    """Yield the tiles of a head's logits, entries in the outer loop; -inf where the sampling mask keeps no entry."""
    dtype = operand_dtype(hidden_TH)
    num_tokens, num_entries = len(hidden_TH), len(weight_VH)
    tokens_a_tile, entries_a_tile = tile_shape(
        num_tokens, num_entries, hidden_TH.shape[1], device_type(hidden_TH.device)
    )
    states = hidden_TH.to(dtype)
    for entries in runs(num_entries, entries_a_tile):
        weight = weight_VH[entries].to(dtype)
        for tokens in runs(num_tokens, tokens_a_tile):
            hidden = states[tokens]
            logits, derivative = transform.apply_(_product(hidden, weight.T), tokens)
            yield LogitTile(tokens, entries, drop_(logits, mask, tokens, entries), derivative, hidden, weight)


def tile_shape(num_tokens: int, num_entries: int, hidden_size: int, device_type: str) -> tuple[int, int]:
    """Return `(tokens, vocabulary entries)` of a tile: logits and weight within the limit of the device."""
    limit = TILE_ELEMENTS.get(device_type, TILE_ELEMENTS[GPU])
    entries = max(1, min(num_entries, _VOCABULARY_SLICE, limit // max(hidden_size, 1)))
    return max(1, min(num_tokens, limit // entries)), entries


def operand_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of GEMM operands: bf16 where a GEMM can return fp32, else at least fp32.

    fp16 is widened on every device, because gradients of logits underflow in fp16.
    """
    return x.dtype if device_type(x.device) == GPU and x.dtype == torch.bfloat16 else wide(x.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    dtype = wide(a.dtype)
    return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)


def _add_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def drop_(logits_TV: Tensor, mask: SamplingMask | None, tokens: slice, entries: slice) -> Tensor:
    """Write -inf to the logits of a tile that the sampling mask does not keep."""
    if mask is None:
        return logits_TV
    return logits_TV.masked_fill_(
        ~mask.tile(tokens, slice(entries.start, entries.start + logits_TV.shape[1])), -math.inf
    )


def head_statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    transform: LogitTransform,
    mask: SamplingMask | None = None,
) -> Tensor:
    """Return the statistics `[4, T]` of this rank's logits, or of those that the sampling mask keeps.

    `labels_T` and the mask's ids count from this rank's first entry.
    """
    statistics = empty_statistics(hidden_TH)
    for tile in logit_tiles(hidden_TH, weight_VH, transform, mask):
        merge_tile_(statistics, tile, labels_T)
    return statistics


def empty_statistics(hidden_TH: Tensor) -> Tensor:
    """Return the statistics `[4, T]` of an empty set of entries."""
    statistics = hidden_TH.new_zeros(4, len(hidden_TH), dtype=wide(hidden_TH.dtype))
    statistics[0] = -math.inf
    return statistics


def merge_tile_(statistics_4T: Tensor, tile: LogitTile, labels_T: Tensor) -> None:
    """Merge the statistics of a tile into those of the entries before."""
    tokens, entries, logits, *_ = tile
    of_tile = tile_statistics(logits, labels_T[tokens] - entries.start)
    statistics_4T[:, tokens] = merge_statistics(torch.stack((statistics_4T[:, tokens], of_tile)))


def head_gradients(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    transform: LogitTransform,
    upstream: UpstreamGradients,
    mask: SamplingMask | None = None,
    *,
    grad_hidden_TH: Tensor | None,
    grad_weight_VH: Tensor | None,
    add_to_weight: bool = False,
    hidden_done: Callable[[], None] = lambda: None,
) -> None:
    """Add this rank's part of the hidden states' gradient to `grad_hidden_TH` (fp32), and write `grad_weight_VH`.

    With `add_to_weight` the weight's gradient is added, too. A gradient that is None is not computed. `hidden_done` is
    called once `grad_hidden_TH` is complete, so that its communication can overlap with the rest.
    """
    num_tokens, sums = len(hidden_TH), None
    for tile in logit_tiles(hidden_TH, weight_VH, transform, mask):
        tokens, entries, logits, derivative, hidden, weight = tile
        labels = labels_T[tokens] - entries.start
        gradient = logit_gradient(logits, labels, upstream, tokens).mul_(derivative).to(weight.dtype)
        if grad_hidden_TH is not None:
            _add_product_(grad_hidden_TH[tokens], gradient, weight)
        if grad_weight_VH is None:
            continue
        if sums is None:
            sums = torch.zeros_like(weight, dtype=wide(weight.dtype))
        _add_product_(sums, gradient.T, hidden)
        if tokens.stop >= num_tokens:
            rows = grad_weight_VH[entries]
            rows.add_(sums) if add_to_weight else rows.copy_(sums)
            sums = None
    hidden_done()


def given_statistics(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return the result of `head_statistics` for logits that the caller has."""
    tiles = [
        tile_statistics(logits_TV[tokens].to(wide(logits_TV.dtype)), labels_T[tokens])
        for tokens in token_runs(logits_TV)
    ]
    return torch.cat(tiles, dim=1)


def given_gradients(logits_TV: Tensor, labels_T: Tensor, upstream: UpstreamGradients, out_TV: Tensor) -> None:
    """Write the gradient of given logits to `out_TV`."""
    for tokens in token_runs(logits_TV):
        # Copy also if the dtype is the same, because the tile is overwritten.
        tile = logits_TV[tokens].to(wide(logits_TV.dtype), copy=True)
        out_TV[tokens] = logit_gradient(tile, labels_T[tokens], upstream, tokens)


def token_runs(rows_TN: Tensor) -> Iterator[slice]:
    """Cut rows into runs of at most as many elements as a tile has."""
    limit = TILE_ELEMENTS.get(device_type(rows_TN.device), TILE_ELEMENTS[GPU])
    return runs(len(rows_TN), max(1, limit // max(rows_TN.shape[1], 1)))
