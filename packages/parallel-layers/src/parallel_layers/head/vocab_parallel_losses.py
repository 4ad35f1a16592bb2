"""Losses on logits whose vocabulary is sharded over a tensor-parallel group.

Rank r holds the columns of the entries `r * V ... (r + 1) * V - 1` of the (padded) vocabulary, `[..., V]`, and all
labels.

- Forward: one all-gather of five statistics a token (`head.softmax_statistics`). Backward: no communication; upstream
  gradients must be the same on all ranks.
- Results are fp32 (fp64 for fp64 logits), bitwise equal on all ranks, and can be differentiated twice.
- Results are finite for any finite logits; logits of -inf are entries of probability zero.

If the logits come from a GEMM, `linear_log_probs` gives the same results without holding them.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.head.logits_operators import logit_statistics_op
from parallel_layers.head.vocabulary import group_name, true_vocab_size

Reduction = Literal["none", "mean", "sum"]
Smoothing = Literal["torch", "megatron"]


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    check_labels: bool = True,
) -> Tensor:
    """Return the log-probability of each label, `z_label - logsumexp(z)`; 0 without gradient for ignored labels.

    Forward: one all-gather. Backward: `dz_j = g (1[j = label] - p_j)`, no communication.

    Args:
        logits: `[..., V]`, this rank's columns.
        labels: `[...]` integers of the whole vocabulary, the same on all ranks.
        group: The tensor-parallel group; None for unsharded logits.
        vocab_size: The size of the vocabulary without padding; columns beyond it have no effect. Default: all columns;
            required with several ranks.
        ignore_index: The label of tokens without a label.
        check_labels: Refuse labels outside the vocabulary, as `VocabParallelEmbedding` refuses ids. Without the check
            such a label gives NaN.

    Returns:
        `[...]`, fp32.

    Raises:
        ValueError: Shapes do not fit; the columns cannot hold the vocabulary; ranks have different columns or
            vocabularies (compared once for each group and size); or a label is outside the vocabulary. The last two are
            raised on every rank.
    """
    return _statistics(logits, labels, group, vocab_size, ignore_index, check_labels)[0]


def vocab_parallel_entropy(
    logits: Tensor, *, group: ProcessGroup | None = None, vocab_size: int | None = None
) -> Tensor:
    """Return the entropy of each distribution in nats, `-sum_j p_j log p_j`: `[..., V]` logits -> `[...]` fp32.

    Forward: one all-gather. Backward: `dz_j = -g p_j (log p_j + entropy)`, no communication.

    Raises:
        ValueError: The columns cannot hold the vocabulary.
    """
    labels = torch.full(logits.shape[:-1], -1, dtype=torch.int64, device=logits.device)
    return _statistics(logits, labels, group, vocab_size, ignore_index=-1, check_labels=False)[1]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing: Smoothing = "torch",
    reduction: Reduction = "mean",
    check_labels: bool = True,
) -> Tensor:
    """Return the cross-entropy with label smoothing, `-(1 - e) log p_label - e mean_j log p_j`; 0 for ignored labels.

    `smoothing="torch"` spreads `label_smoothing` over all K entries, as `torch.nn.functional.cross_entropy` does:
    e = label_smoothing. `smoothing="megatron"` spreads it over the K - 1 other entries, as Megatron-Core does:
    e = label_smoothing * K / (K - 1). Forward: one all-gather. Backward: no communication.

    Args:
        logits: `[..., V]`, this rank's columns.
        labels: `[...]` integers of the whole vocabulary, the same on all ranks.
        group: The tensor-parallel group.
        vocab_size: The size of the vocabulary without padding.
        ignore_index: The label of tokens without a label.
        label_smoothing: In [0, 1).
        smoothing: The convention of `label_smoothing`: "torch" or "megatron".
        reduction: "none", "sum", or "mean" over the labels that are not ignored (NaN if all are, as in torch).
        check_labels: As in `vocab_parallel_log_probs`.

    Returns:
        fp32: `[...]` with `reduction="none"`, else a scalar.

    Raises:
        ValueError: As `vocab_parallel_log_probs`; also for an unknown option or a smoothing outside [0, 1).
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must be in [0, 1)")
    if smoothing not in ("torch", "megatron"):
        raise ValueError(f"smoothing={smoothing!r} must be 'torch' or 'megatron'")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction={reduction!r} must be 'none', 'mean' or 'sum'")
    log_probs, _, logsumexp, mean_logit = _statistics(logits, labels, group, vocab_size, ignore_index, check_labels)
    losses = -log_probs
    kept = labels != ignore_index
    if label_smoothing:
        num_entries = true_vocab_size(logits.shape[-1], vocab_size, group)
        if smoothing == "megatron":
            label_smoothing *= num_entries / max(num_entries - 1, 1)
        uniform = torch.where(kept, logsumexp - mean_logit, 0.0)
        losses = (1.0 - label_smoothing) * losses + label_smoothing * uniform
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / kept.sum()


def _statistics(
    logits: Tensor,
    labels: Tensor,
    group: ProcessGroup | None,
    vocab_size: int | None,
    ignore_index: int,
    check_labels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `(log_probs, entropy, logsumexp, mean_logit)`, each in the shape of the labels."""
    if logits.ndim < 1 or labels.shape != logits.shape[:-1] or not logits.is_floating_point():
        raise ValueError(
            f"logits {logits.dtype} {list(logits.shape)} must be floating [..., V], labels {list(labels.shape)} [...]"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels must be int64 or int32, got {labels.dtype}")
    outputs = logit_statistics_op(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        true_vocab_size(logits.shape[-1], vocab_size, group),
        ignore_index,
        check_labels,
        group_name(group),
    )
    log_probs, entropy, logsumexp, mean_logit = (output.view(labels.shape) for output in outputs)
    return log_probs, entropy, logsumexp, mean_logit
