"""Log-probs with the same bits at every tensor-parallel size and in every pack.

Shape suffixes: T tokens, H hidden, V this rank's rows of the head.
"""

from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.autocast import as_operand
from parallel_layers.distributed import async_collectives
from parallel_layers.head import fused, linear_operators
from parallel_layers.head.embedding import check_token_ids, vocab_range
from parallel_layers.head.linear_log_probs import LogProbs, _validate
from parallel_layers.head.softmax_statistics import NEGLIGIBLE, LogitTransform
from parallel_layers.head.vocabulary import IGNORE_INDEX, check_rows, gather_rows, group_name, true_vocab_size
from parallel_layers.invariant.blocks import BLOCKS, check_blocks
from parallel_layers.kernels.elementary_functions import exp, log, tanh, tree_sum
from parallel_layers.kernels.exact_matmul import exact_product

_TILE_LOGITS = 1 << 22
# Triton's layout of a tile, and so the order of sums, depends on whether the number of tokens is a multiple of 16.
_TOKENS_MULTIPLE = 16


def linear_log_probs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = True,
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    blocks: int = BLOCKS,
) -> LogProbs:
    """Compute `parallel_layers.linear_log_probs` so that a token's bits depend only on its hidden state and the head.

    The vocabulary is cut at the first entry of every rank in groups of 1, 2, 4, ... `blocks` ranks. A part's statistics
    (`head.softmax_statistics`) are computed in a fixed order by the rank that holds the part. After one all-gather of
    `[parts of a rank, 4, T]` every rank merges all parts in order. Gradients are those of the ordinary function and not
    invariant.

    Arguments are those of `parallel_layers.linear_log_probs`, and:
        blocks: A power of two; a multiple of the group's size.

    Raises:
        ValueError: The ordinary function raises, the group's size does not divide `blocks`, ranks do not hold
            `ceil(vocab_size / tp)` rows each, or the dtype is fp64.
    """
    tp = 1 if group is None else group.size()
    check_blocks(blocks, tp)
    hidden_TH, weight_VH = as_operand(hidden_TH), as_operand(weight_VH)
    vocab_size = true_vocab_size(len(weight_VH), vocab_size, group)
    check_rows(len(weight_VH), vocab_size, group, hidden_TH.device)
    _validate(hidden_TH, weight_VH, labels_T, temperature, tp, sequence_parallel, logit_scale, logit_softcap)
    cuts = _cuts(vocab_size, blocks)
    if wrong := [r for r in range(tp) if min(r * len(weight_VH), vocab_size) not in cuts]:
        raise ValueError(
            f"at tp={tp} each rank holds {len(weight_VH)} rows, so that rank {wrong[0]} begins at entry "
            f"{wrong[0] * len(weight_VH)} of {vocab_size}, where no rank does at another tp; give each rank "
            f"ceil({vocab_size} / {tp}) = {-(-vocab_size // tp)} rows"
        )
    if hidden_TH.dtype == torch.float64:
        raise ValueError("invariant log-probs take float32, bfloat16 or float16, not torch.float64")
    log_probs, entropy_T, *_ = _LinearLogProbs.apply(
        hidden_TH,
        weight_VH,
        labels_T,
        temperature.detach().expand(len(labels_T)) if isinstance(temperature, Tensor) else None,
        1.0 if isinstance(temperature, Tensor) else float(temperature),
        float(logit_scale),
        float(logit_softcap or 0.0),
        vocab_size,
        sequence_parallel,
        group_name(group),
        False,
        group,
        cuts,
    )
    return LogProbs(log_probs, entropy_T if entropy else None)


class _LinearLogProbs(torch.autograd.Function):
    """The invariant forward with the backward of the ordinary operator.

    Arguments are those of the operator, the group, and the cuts of the vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *given, group, cuts = arguments
        hidden_TH, weight_VH, labels_T, temperatures_T, temperature, scale, softcap = given[:7]
        vocab_size, sequence_parallel, *_ = given[7:]
        check_token_ids(labels_T, vocab_size, ignore_index=IGNORE_INDEX)
        begin, last = vocab_range(vocab_size, group, len(weight_VH))
        labels = labels_T.long() - begin
        hidden = gather_rows(hidden_TH, group) if sequence_parallel else hidden_TH
        transform = LogitTransform(scale, softcap, temperature if temperatures_T is None else temperatures_T)
        parts = [
            _part_statistics(hidden, weight_VH, labels, transform, first - begin, end - begin)
            for first, end in pairwise(cuts)
            if begin <= first < last
        ]
        statistics = reduce(_merge, _parts_of_all_ranks(parts, hidden, len(weight_VH), cuts, group))
        maximum, total, moment, label_logit = statistics.unbind()
        log_total = log(total)
        nothing = hidden_TH.new_empty(0)
        outputs = (
            ((label_logit - maximum) - log_total).masked_fill(labels_T == IGNORE_INDEX, 0.0),
            log_total - moment / total,
            maximum + log_total,
            nothing,
            nothing.float().clone(),
        )
        linear_operators._setup_context(ctx, tuple(given), outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        return linear_operators._backward(ctx, *gradients)[: len(needs)]


def _cuts(vocab_size: int, blocks: int) -> list[int]:
    """Return the first entries of all ranks in groups of 1, 2, 4, ... `blocks` ranks, and the vocabulary size."""
    sizes = [1 << n for n in range(blocks.bit_length())]
    begins = {min(r * -(-vocab_size // tp), vocab_size) for tp in sizes for r in range(tp)}
    return sorted(begins | {vocab_size})


def _parts_of_all_ranks(
    parts_4T: list[Tensor], hidden_TH: Tensor, rows: int, cuts: list[int], group: ProcessGroup | None
) -> list[Tensor]:
    """Return the statistics `[4, T]` of all parts of the vocabulary, in order."""
    if group is None or not async_collectives.is_sharded(group):
        return parts_4T
    counts = [sum(r * rows <= first < (r + 1) * rows for first in cuts[:-1]) for r in range(group.size())]
    empty = hidden_TH.new_zeros(4, len(hidden_TH), dtype=torch.float32)
    padded = torch.stack([*parts_4T, *[empty] * (max(counts) - len(parts_4T))])
    gathered = gather_rows(padded[None], group)
    return [part for found, count in zip(gathered, counts, strict=True) for part in found[:count]]


def _part_statistics(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, transform: LogitTransform, first: int, last: int
) -> Tensor:
    """Return the statistics `[4, T]` of rows `first` to `last - 1`; labels count from row 0."""
    weight_VH, labels_T = weight_VH[first:last], labels_T - first
    if fused.supports(hidden_TH, weight_VH):
        num_tokens = len(hidden_TH)
        if more := -num_tokens % _TOKENS_MULTIPLE:
            hidden_TH, labels_T = F.pad(hidden_TH, (0, 0, 0, more)), F.pad(labels_T, (0, more), value=-1)
            if isinstance(transform.temperature, Tensor):
                transform = transform._replace(temperature=F.pad(transform.temperature, (0, more), value=1.0))
        return fused.head_statistics(hidden_TH, weight_VH, labels_T, transform)[:, :num_tokens]
    step = max(1, _TILE_LOGITS // len(weight_VH))
    parts = []
    for start in range(0, max(len(hidden_TH), 1), step):
        tokens = slice(start, start + step)
        logits = _logits(exact_product(hidden_TH[tokens], weight_VH), transform, tokens)
        parts.append(_statistics(logits, labels_T[tokens]))
    return torch.cat(parts, dim=1)


def _logits(raw_TV: Tensor, transform: LogitTransform, tokens: slice) -> Tensor:
    z = raw_TV * transform.scale
    if transform.softcap:
        z = transform.softcap * tanh(z / transform.softcap)
    if isinstance(transform.temperature, Tensor):
        return z / transform.temperature[tokens].float()[:, None]
    return z / transform.temperature


def _statistics(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Compute `head.softmax_statistics.tile_statistics` in a fixed order."""
    maximum = logits_TV.amax(dim=-1)
    shifted = logits_TV - maximum[:, None]
    weights = exp(shifted)
    inside = (labels_T >= 0) & (labels_T < logits_TV.shape[1])
    label_logits = logits_TV.gather(-1, labels_T.clamp(0, logits_TV.shape[1] - 1)[:, None])[:, 0]
    moments = weights * shifted.clamp(min=NEGLIGIBLE)
    return torch.stack((maximum, tree_sum(weights), tree_sum(moments), torch.where(inside, label_logits, 0.0)))


def _merge(left_4T: Tensor, right_4T: Tensor) -> Tensor:
    """Merge the statistics `[4, T]` of two disjoint, non-empty parts."""
    maximum = torch.maximum(left_4T[0], right_4T[0])
    merged = []
    for part_maximum, total, moment, _ in (left_4T, right_4T):
        shift = part_maximum - maximum
        factor = exp(shift)
        merged.append((total * factor, (moment + shift * total) * factor))
    (total, moment), (other_total, other_moment) = merged
    return torch.stack((maximum, total + other_total, moment + other_moment, left_4T[3] + right_4T[3]))
