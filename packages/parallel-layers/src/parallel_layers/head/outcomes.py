"""Distillation from a teacher's K most likely tokens: K outcomes, and one for all other tokens together.

Shape suffixes: T tokens, H hidden, V this rank's rows of the head, K listed tokens, N = K + 1 outcomes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.head.chunked import NEGLIGIBLE, LogitTransform
from parallel_layers.head.divergence import Divergence
from parallel_layers.head.sides import HeadGradients, Side, Tile, add_gradients, tiles_of, whole_tokens
from parallel_layers.head.vocabulary import gather_rows, vocab_range
from parallel_layers.module.autocast import wide, without_autocast
from parallel_layers.training.weight_gradients import Destination


def outcome_divergence(log_p_TK: Tensor, logits_TN: Tensor, ids_TK: Tensor, divergence: Divergence) -> Tensor:
    """Return the divergence `[T]` over the outcomes; `logits_TN` are the student's, of `outcome_logits`.

    The teacher's tail has the mass that the listed tokens leave, at least the dtype's epsilon.
    """
    log_p_TK = log_p_TK.detach().to(logits_TN.dtype).masked_fill(ids_TK < 0, -math.inf)
    tail = (1.0 - log_p_TK.exp().sum(dim=1, keepdim=True)).clamp(min=torch.finfo(log_p_TK.dtype).eps).log()
    none = torch.cat((ids_TK < 0, torch.zeros_like(tail, dtype=torch.bool)), dim=1)
    log_p = torch.cat((log_p_TK, tail), dim=1).masked_fill(none, NEGLIGIBLE)
    log_q = logits_TN.log_softmax(dim=1).masked_fill(none, NEGLIGIBLE)
    if divergence.mixes:
        log_m = torch.logaddexp(log_p + math.log(divergence.share), log_q + math.log1p(-divergence.share))
    else:
        log_m = log_q if divergence.share == 0.0 else log_p
    terms = []
    for weight, log in ((divergence.teacher, log_p), (divergence.student, log_q)):
        if weight:
            mass = log.exp()
            # An outcome without mass adds 0, although its logarithm may be infinite.
            terms.append(weight * torch.where(mass > 0, mass * (log - log_m), 0.0).sum(dim=1))
    return torch.stack(terms).sum(dim=0)


def outcome_logits(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    ids_TK: Tensor,
    transform: LogitTransform,
    vocab_size: int,
    group: ProcessGroup | None,
    sequence_parallel: bool,
) -> Tensor:
    """Return the logits `[T, N]` fp32: of the listed tokens (-inf for ids of -1), and the log-sum-exp of all others.

    Forward: all-gather of N + 1 numbers a token. Backward: that of `linear_log_probs`.
    """
    logits: Tensor = _OutcomeLogits.apply(
        hidden_TH, weight_VH, ids_TK.long(), transform, vocab_size, group, sequence_parallel, Destination.of(weight_VH)
    )
    return logits


class _OutcomeLogits(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        hidden_TH, weight_VH, ids_TK, *ctx.options, ctx.destination = arguments
        side, local_TK = _local(hidden_TH, weight_VH, ids_TK, *ctx.options)
        dtype, group = wide(hidden_TH.dtype), ctx.options[2]
        listed = torch.zeros(ids_TK.shape, dtype=dtype, device=ids_TK.device)
        maxima = torch.full((len(ids_TK),), -math.inf, dtype=dtype, device=ids_TK.device)
        sums = torch.zeros_like(maxima)
        for tile in tiles_of((side,)):
            logits, of_tile, inside, _ = _masked(tile, side, local_TK)
            listed[tile.tokens] += torch.where(inside, of_tile, 0.0)
            if logits.shape[1]:
                before = maxima[tile.tokens].clone()
                merged = torch.maximum(before, logits.amax(dim=1))
                shift = merged.masked_fill(merged == -math.inf, 0.0)
                sums[tile.tokens] *= (before - shift).exp()
                sums[tile.tokens] += logits.sub_(shift[:, None]).exp_().sum(dim=1)
                maxima[tile.tokens] = merged
        if async_collectives.is_sharded(group):
            listed = gather_rows(listed[None], group).sum(dim=0)
        tails = gather_rows((maxima + sums.log())[None], group).logsumexp(dim=0)
        listed = listed.masked_fill(ids_TK < 0, -math.inf)
        ctx.save_for_backward(hidden_TH, weight_VH, ids_TK, tails)
        return torch.cat((listed, tails[:, None]), dim=1)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, upstream_TN: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, ids_TK, tails = ctx.saved_tensors
        side, local_TK = _local(hidden_TH, weight_VH, ids_TK, *ctx.options)
        # A tail of -inf has no entries with a weight.
        tails = tails.masked_fill(tails == -math.inf, 0.0)

        def gradient(tile: Tile) -> Tensor:
            logits, _, inside, derivative = _masked(tile, side, local_TK)
            upstream = upstream_TN[tile.tokens]
            dz_TV = logits.sub_(tails[tile.tokens, None]).exp_().mul_(upstream[:, -1:])
            if dz_TV.shape[1]:
                columns = (local_TK[tile.tokens] - tile.entries.start).clamp(0, dz_TV.shape[1] - 1)
                dz_TV.scatter_add_(1, columns, torch.where(inside, upstream[:, :-1], 0.0))
            return dz_TV.mul_(derivative)

        gradients = HeadGradients(ctx, side.hidden_TH, weight_VH)
        add_gradients((side,), gradient, gradients.out)
        return gradients.of_inputs(hidden_TH.dtype, *ctx.options[2:])


def _local(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    ids_TK: Tensor,
    transform: LogitTransform,
    vocab_size: int,
    group: ProcessGroup | None,
    sequence_parallel: bool,
) -> tuple[Side, Tensor]:
    """Return this rank's rows over all tokens, and the ids counted from its first row."""
    first, last = vocab_range(vocab_size, group, len(weight_VH))
    side = Side(whole_tokens(hidden_TH, group, sequence_parallel), weight_VH[: last - first], transform)
    return side, torch.where((ids_TK >= first) & (ids_TK < last), ids_TK - first, -1)


def _masked(tile: Tile, side: Side, local_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
    """Return the tile's logits with -inf at listed tokens, the listed logits `[t, K]`, and which are in the tile.

    The last result is the derivative of the logits by the raw products.
    """
    (logits,), derivative = tile.logits((side,))
    num_entries = logits.shape[1]
    columns = local_TK[tile.tokens] - tile.entries.start
    inside = (local_TK[tile.tokens] >= 0) & (columns >= 0) & (columns < num_entries)
    if num_entries == 0:
        return logits, torch.zeros_like(columns, dtype=logits.dtype), inside, derivative
    columns = columns.clamp(0, num_entries - 1)
    listed = logits.gather(1, columns)
    # The minimum with infinity changes nothing, where an id is outside the tile.
    logits.scatter_reduce_(1, columns, torch.where(inside, -math.inf, math.inf).to(logits.dtype), "amin")
    return logits, listed, inside, derivative
