"""The divergence of two heads over the whole vocabulary, and its backward.

Shape suffixes: T tokens, H hidden, V this rank's rows of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.head import divergence as tiles
from parallel_layers.head.chunked import LogitTransform, operand_dtype
from parallel_layers.head.divergence import Constants, Divergence
from parallel_layers.head.sides import Gradients, HeadGradients, Pair, Side, whole_tokens
from parallel_layers.head.teacher_rows import is_local, paired_rows
from parallel_layers.head.vocabulary import gather_rows
from parallel_layers.module.autocast import without_autocast
from parallel_layers.training.weight_gradients import Destination


class HeadOptions(NamedTuple):
    """The divergence, and how both heads are sharded and transformed; see `linear_distillation` and `TeacherHead`."""

    divergence: Divergence
    vocab_size: int
    group: ProcessGroup | None
    sequence_parallel: bool
    teacher_group: ProcessGroup | None
    teacher_sequence_parallel: bool
    student_ids: Tensor | None
    """As in `paired_rows`."""
    teacher_transform: LogitTransform
    transform: LogitTransform


def head_divergence(
    hidden_TH: Tensor, weight_VH: Tensor, teacher_TH: Tensor, teacher_VH: Tensor, options: HeadOptions
) -> Tensor:
    """Return the divergence `[T]` of each token."""
    result: Tensor = _HeadDivergence.apply(
        hidden_TH, weight_VH, teacher_TH, teacher_VH, options, Destination.of(weight_VH)
    )
    return result


class _HeadDivergence(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.options, ctx.destination = arguments
        divergence, group = ctx.options.divergence, ctx.options.group
        pairs = _Pairs(tensors, ctx.options)

        def merged(statistics: Tensor) -> Tensor:
            return tiles.merge_pair_statistics(gather_rows(statistics[None], group))

        if divergence.mixes and pairs.take_whole_rows:
            ((_, pair),) = pairs
            logsumexps, sums = tiles.mixture_by_tokens(pair, divergence, len(pairs.weight), merged)
        else:
            statistics = tiles.empty_statistics(pairs.hidden)
            for _, pair in pairs:
                statistics = tiles.merge_pair_statistics(torch.stack((statistics, tiles.pair_statistics(pair))))
            logsumexps, forward_kl, reverse_kl = tiles.finish_pair_statistics(merged(statistics))
            sums = torch.zeros_like(logsumexps)
            for _, pair in pairs if divergence.mixes else ():
                sums += tiles.mixture_sums(pair, logsumexps, divergence)
        if divergence.mixes:
            result, total = gather_rows(sums[None], group).sum(dim=0)
        elif divergence.share == 1.0:
            result, total = reverse_kl, reverse_kl + 1.0
        else:
            result, total = forward_kl, -torch.ones_like(forward_kl)
        ctx.save_for_backward(*tensors, logsumexps, total)
        return result.clone()

    @staticmethod
    @without_autocast
    def backward(ctx: Any, upstream_T: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, logsumexps, total = ctx.saved_tensors
        options, pairs = ctx.options, _Pairs(tensors, ctx.options)
        constants = Constants(logsumexps[0], logsumexps[1], total, upstream_T.to(total.dtype))
        gradients = HeadGradients(ctx, pairs.hidden, pairs.weight)
        grad_hidden, grad_weight = gradients.out
        for rows, pair in pairs:
            # A view for a slice, a copy for an index.
            grad_rows = None if grad_weight is None else grad_weight[rows]
            tiles.pair_gradients(pair, constants, options.divergence, Gradients(grad_hidden, grad_rows))
            if grad_weight is not None and grad_rows is not None and isinstance(rows, Tensor):
                grad_weight[rows] = grad_rows
        return gradients.of_inputs(tensors[0].dtype, options.group, options.sequence_parallel)


class _Pairs:
    """Both sides over all tokens and some of this rank's rows of the student at a time: `(rows, pair)`."""

    def __init__(self, tensors: list[Tensor], options: HeadOptions) -> None:
        hidden_TH, self.weight, teacher_TH, self.teacher_weight = tensors
        self.options = options
        heads = (self.weight, options.group, self.teacher_weight, options.teacher_group)
        in_place = all(x.dtype == operand_dtype(x) for x in (self.weight, self.teacher_weight))
        # Whole rows are for heads that the GEMMs take as they are, without a copy of all rows.
        self.take_whole_rows = in_place and options.student_ids is None and is_local(*heads)
        self.hidden = whole_tokens(hidden_TH, options.group, options.sequence_parallel)
        self.teacher_hidden = whole_tokens(teacher_TH, options.teacher_group, options.teacher_sequence_parallel)

    def __iter__(self) -> Iterator[tuple[slice | Tensor, Pair]]:
        options = self.options
        shards = (self.weight, options.vocab_size, options.group, self.teacher_weight, options.teacher_group)
        for rows, teacher_rows in paired_rows(*shards, options.student_ids):
            yield (
                rows,
                Pair(
                    Side(self.teacher_hidden, teacher_rows, options.teacher_transform),
                    Side(self.hidden, self.weight[rows], options.transform),
                ),
            )
