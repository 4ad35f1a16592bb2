"""Log-probabilities whose bits are the same at every size of the tensor-parallel group, and in every pack.

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
from parallel_layers.head.linear_log_probs import LogProbs, _validate
from parallel_layers.head.logit_transform import LogitTransform
from parallel_layers.head.softmax_statistics import NEGLIGIBLE
from parallel_layers.head.vocabulary import (
    LocalLabels,
    LocalVocabulary,
    check_labels,
    check_rows,
    gather_rows,
    group_name,
    true_vocab_size,
)
from parallel_layers.invariant.blocks import BLOCKS, check_blocks
from parallel_layers.kernels.elementary_functions import exp, log, tanh, tree_sum
from parallel_layers.kernels.exact_matmul import exact_product

_TILE_LOGITS = 1 << 22
# Triton lays a tile out by whether the number of tokens is a multiple of 16, and the layout orders a sum.
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
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    check_labels: bool = True,
    blocks: int = BLOCKS,
) -> LogProbs:
    """As `parallel_layers.linear_log_probs`: a token's results depend on its own hidden state and the head alone.

    The vocabulary is cut where a rank of any group of 1, 2, 4, ... up to `blocks` ranks begins: into `blocks` parts,
    some more where it does not divide. The statistics of a part (`head.softmax_statistics`) are computed in one order
    by the rank that has it; after one all-gather of `[parts of a rank, 4, T]` every rank merges those of all parts,
    first to last. The gradients are those of the ordinary function, which need not be invariant.

    Args as for `parallel_layers.linear_log_probs`, and:
        blocks: A power of two that the group's size divides.

    Raises:
        ValueError: What the ordinary function raises; a group whose size does not divide `blocks`; ranks that hold
            other rows than `ceil(vocab_size / tp)` each, so that they begin elsewhere; fp64.
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
        None,
        1.0 if isinstance(temperature, Tensor) else float(temperature),
        float(logit_scale),
        float(logit_softcap or 0.0),
        vocab_size,
        ignore_index,
        check_labels,
        False,
        sequence_parallel,
        group_name(group),
        group,
        cuts,
    )
    return LogProbs(log_probs, entropy_T if entropy else None)


class _LinearLogProbs(torch.autograd.Function):
    """Takes the arguments of `linear_operators.linear_log_probs_op`, whose backward it has, and two of its own.

    These are the group, and where the vocabulary is cut.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *given, group, cuts = arguments
        hidden_TH, weight_VH, labels_T, temperatures_T, _, temperature, scale, softcap = given[:8]
        vocab_size, ignore_index, check, _, sequence_parallel, _ = given[8:]
        if check:
            check_labels(labels_T, vocab_size, ignore_index)
        vocabulary = LocalVocabulary.of(len(weight_VH), vocab_size, group)
        labels = LocalLabels.of(labels_T, vocabulary, vocab_size, ignore_index)
        hidden = gather_rows(hidden_TH, group) if sequence_parallel else hidden_TH
        transform = LogitTransform(scale, softcap, temperature if temperatures_T is None else temperatures_T)
        last = vocabulary.first + vocabulary.size
        parts = [
            _part_statistics(
                hidden, weight_VH, labels.local, transform, first - vocabulary.first, end - vocabulary.first
            )
            for first, end in pairwise(cuts)
            if vocabulary.first <= first < last
        ]
        statistics = reduce(_merge, _parts_of_all_ranks(parts, hidden, len(weight_VH), cuts, group))
        maximum, total, moment, label_logit = statistics.unbind()
        log_total = log(total)
        nothing = hidden_TH.new_empty(0)
        outputs = (
            labels.mask((label_logit - maximum) - log_total),
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
    """Where a rank begins in a group of 1, 2, 4, ... `blocks` ranks; and the end."""
    sizes = [1 << n for n in range(blocks.bit_length())]
    begins = {min(r * -(-vocab_size // tp), vocab_size) for tp in sizes for r in range(tp)}
    return sorted(begins | {vocab_size})


def _parts_of_all_ranks(
    parts_4T: list[Tensor], hidden_TH: Tensor, rows: int, cuts: list[int], group: ProcessGroup | None
) -> list[Tensor]:
    """The statistics `[4, T]` of every part of the vocabulary, first to last."""
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
    """Statistics `[4, T]` of the rows from `first` up to `last`; the labels count from row 0."""
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
    """As `head.softmax_statistics.tile_statistics`, in one order."""
    maximum = logits_TV.amax(dim=-1)
    shifted = logits_TV - maximum[:, None]
    weights = exp(shifted)
    inside = (labels_T >= 0) & (labels_T < logits_TV.shape[1])
    label_logits = logits_TV.gather(-1, labels_T.clamp(0, logits_TV.shape[1] - 1)[:, None])[:, 0]
    moments = weights * shifted.clamp(min=NEGLIGIBLE)
    return torch.stack((maximum, tree_sum(weights), tree_sum(moments), torch.where(inside, label_logits, 0.0)))


def _merge(left_4T: Tensor, right_4T: Tensor) -> Tensor:
    """The statistics of two disjoint parts, neither of them empty."""
    maximum = torch.maximum(left_4T[0], right_4T[0])
    merged = []
    for part_maximum, total, moment, _ in (left_4T, right_4T):
        shift = part_maximum - maximum
        factor = exp(shift)
        merged.append((total * factor, (moment + shift * total) * factor))
    (total, moment), (other_total, other_moment) = merged
    return torch.stack((maximum, total + other_total, moment + other_moment, left_4T[3] + right_4T[3]))
