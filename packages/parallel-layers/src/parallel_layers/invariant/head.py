"""Log-probabilities whose bits are the same at every size of the tensor-parallel group, and in every pack.

Shape suffixes: T tokens, H hidden, V this rank's rows of the head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers import comm
from parallel_layers.elementary import exp, log, tanh, tree_sum
from parallel_layers.exact import exact_product
from parallel_layers.invariant.blocks import BLOCKS, check_blocks
from parallel_layers.losses import fused, linear_op
from parallel_layers.losses.linear import LogProbs, _validate
from parallel_layers.losses.logits import LogitTransform
from parallel_layers.losses.softmax import NEGLIGIBLE
from parallel_layers.losses.vocabulary import LocalLabels, LocalVocabulary, check_labels, gather_rows, group_name

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

    The vocabulary is cut into `blocks` blocks of `ceil(vocab_size / blocks)` entries, whatever the group's size. The
    statistics of a block (`losses.softmax`) are computed in one order, and those of all blocks merged as a binary tree:
    a rank merges its own, and after one all-gather of `[4, T]` every rank merges the ranks'. The gradients are those
    of the ordinary function, which need not be invariant.

    Args as for `parallel_layers.linear_log_probs`, and:
        blocks: A power of two that the group's size divides.

    Raises:
        ValueError: What the ordinary function raises; a group whose size does not divide `blocks`; a vocabulary of
            which the ranks do not hold whole blocks; fp64.
    """
    tp = 1 if group is None else group.size()
    check_blocks(blocks, tp)
    vocab_size = len(weight_VH) * tp if vocab_size is None else vocab_size
    _validate(
        hidden_TH, weight_VH, labels_T, temperature, vocab_size, tp, sequence_parallel, logit_scale, logit_softcap
    )
    block = -(-vocab_size // blocks)
    if tp > 1 and len(weight_VH) != blocks // tp * block:
        raise ValueError(
            f"at tp={tp} each rank holds {len(weight_VH)} rows of a vocabulary of {vocab_size}, which are not "
            f"{blocks // tp} blocks of {block}; pad the vocabulary to a multiple of {blocks}"
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
        (block, blocks // tp),
    )
    return LogProbs(log_probs, entropy_T if entropy else None)


class _LinearLogProbs(torch.autograd.Function):
    """Takes the arguments of `linear_op.linear_log_probs_op`, whose backward it has, and two of its own.

    These are the group, and the size of a block with the number of those that a rank has.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *given, group, (block, count) = arguments
        hidden_TH, weight_VH, labels_T, temperatures_T, _, temperature, scale, softcap = given[:8]
        vocab_size, ignore_index, check, _, sequence_parallel, _ = given[8:]
        if check:
            check_labels(labels_T, vocab_size, ignore_index)
        vocabulary = LocalVocabulary.of(len(weight_VH), vocab_size, group)
        labels = LocalLabels.of(labels_T, vocabulary, vocab_size, ignore_index)
        hidden = gather_rows(hidden_TH, group) if sequence_parallel else hidden_TH
        transform = LogitTransform(scale, softcap, temperature if temperatures_T is None else temperatures_T)
        parts = []
        for first in range(0, block * count, block):
            weight = weight_VH[first : min(first + block, vocabulary.size)]
            parts.append(_block_statistics(hidden, weight, labels.local - first, transform))
        statistics = _merge_tree(parts)
        if group is not None and comm.is_sharded(group):
            statistics = _merge_tree(list(gather_rows(statistics[None], group).unbind()))
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
        linear_op._setup_context(ctx, tuple(given), outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        return linear_op._backward(ctx, *gradients)[: len(needs)]


def _block_statistics(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, transform: LogitTransform) -> Tensor:
    """Statistics `[4, T]` of one block of the vocabulary; `labels_T` counts from its first entry."""
    if not len(weight_VH):
        return torch.tensor([float("-inf"), 0.0, 0.0, 0.0], device=hidden_TH.device)[:, None].expand(-1, len(hidden_TH))
    if fused.supports(hidden_TH, weight_VH):
        more = -len(hidden_TH) % _TOKENS_MULTIPLE
        if isinstance(transform.temperature, Tensor):
            transform = transform._replace(temperature=F.pad(transform.temperature, (0, more), value=1.0))
        hidden, labels = F.pad(hidden_TH, (0, 0, 0, more)), F.pad(labels_T, (0, more), value=-1)
        return fused.head_statistics(hidden, weight_VH, labels, transform)[:, : len(hidden_TH)]
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
    """As `losses.softmax.tile_statistics`, in one order."""
    maximum = logits_TV.amax(dim=-1)
    shifted = logits_TV - maximum[:, None]
    weights = exp(shifted)
    inside = (labels_T >= 0) & (labels_T < logits_TV.shape[1])
    label_logits = logits_TV.gather(-1, labels_T.clamp(0, logits_TV.shape[1] - 1)[:, None])[:, 0]
    moments = weights * shifted.clamp(min=NEGLIGIBLE)
    return torch.stack((maximum, tree_sum(weights), tree_sum(moments), torch.where(inside, label_logits, 0.0)))


def _merge_tree(parts_4T: list[Tensor]) -> Tensor:
    """The statistics of a power of two of disjoint sets, neighbours first."""
    while len(parts_4T) > 1:
        parts_4T = [_merge(left, right) for left, right in zip(parts_4T[::2], parts_4T[1::2], strict=True)]
    return parts_4T[0]


def _merge(left_4T: Tensor, right_4T: Tensor) -> Tensor:
    maximum = torch.maximum(left_4T[0], right_4T[0])
    merged = []
    for part_maximum, total, moment, _ in (left_4T, right_4T):
        # A set without weight must not turn 0 * -inf into NaN.
        shift = torch.where(part_maximum == float("-inf"), 0.0, part_maximum - maximum)
        factor = torch.where(part_maximum == float("-inf"), 0.0, exp(shift))
        merged.append((total * factor, (moment + shift * total) * factor))
    (total, moment), (other_total, other_moment) = merged
    return torch.stack((maximum, total + other_total, moment + other_moment, left_4T[3] + right_4T[3]))
