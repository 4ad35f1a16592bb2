"""Losses on logits whose vocabulary is sharded over a tensor-parallel group.

Every rank of `group` holds `[..., V]` columns of the logits: rank r those of entries `r * V ... (r + 1) * V - 1` of the
(padded) vocabulary, and all the labels. All three functions make one all-gather in the forward (five statistics a
token, see `losses.softmax`) and no communication in the backward, whose upstream gradients are the same on all ranks.
Results are fp32 (fp64 for fp64 logits), bitwise equal on all ranks, finite for any finite logits and for logits of -inf
(entries of probability zero), and can be differentiated twice. Logits are never modified. When the logits come from a
matrix product, `linear_log_probs` gives the same without ever holding them.
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
    """Log-probability of each label: `z_label - logsumexp(z)`, 0 and without gradient where the label is ignored.

    `dz_j = g (1[j = label] - p_j)`. Forward: one all-gather; backward: none.

    Args:
        logits: `[..., V]`, this rank's columns.
        labels: `[...]`, integer, of the whole vocabulary; the same on all ranks.
        group: the tensor-parallel group; None when the logits are whole.
        vocab_size: the true vocabulary; columns beyond it are padding, invisible here. Default: all columns; required
            with several ranks, which do not know how much of them is padding.
        ignore_index: the label that means "no label".
        check_labels: whether a label outside the vocabulary is an error: a ValueError, or for CUDA labels an assertion
            on the device, as in `VocabParallelEmbedding`. Unchecked, such a label gives NaN, no plausible number.

    Returns:
        `[...]`, fp32.

    Raises:
        ValueError: shapes that do not fit, a vocabulary that the columns cannot hold, ranks with unequal columns or
            vocabularies (on every rank alike; compared once for each group and size), or (on every rank alike) a label
            outside the vocabulary.
    """
    return _statistics(logits, labels, group, vocab_size, ignore_index, check_labels)[0]


def vocab_parallel_entropy(
    logits: Tensor, *, group: ProcessGroup | None = None, vocab_size: int | None = None
) -> Tensor:
    """Entropy in nats of each distribution, `-sum_j p_j log p_j`, fp32 `[...]`, from `[..., V]` logits.

    `dz_j = -g p_j (log p_j + entropy)`. Forward: one all-gather; backward: none. Raises ValueError for a
    vocabulary that the columns cannot hold.
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
    """Cross-entropy with label smoothing, `-(1 - e) log p_label - e mean_j log p_j`; 0 where the label is ignored.

    With `smoothing="torch"`, e is `label_smoothing`: that mass is spread over all K entries, the label included, as in
    `torch.nn.functional.cross_entropy`. With `smoothing="megatron"` it is spread over the K - 1 other entries, as in
    Megatron-Core: the same formula with e = label_smoothing * K / (K - 1).
    Forward: one all-gather; backward: none.

    Args:
        logits: `[..., V]`, this rank's columns.
        labels: `[...]`, integer, of the whole vocabulary; the same on all ranks.
        group: the tensor-parallel group; None when the logits are whole.
        vocab_size: the true vocabulary; columns beyond it are padding, invisible here. Default: all columns; required
            with several ranks, which do not know how much of them is padding.
        ignore_index: the label that means "no label".
        label_smoothing: in [0, 1).
        smoothing: the convention of `label_smoothing`.
        reduction: "none", "sum", or "mean" over the labels that are not ignored (NaN when all are, as in torch).
        check_labels: as in `vocab_parallel_log_probs`.

    Returns:
        fp32: `[...]` with `reduction="none"`, else a scalar.

    Raises:
        ValueError: as `vocab_parallel_log_probs`, and an unknown option or a smoothing outside [0, 1).
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
    """`(log_probs, entropy, logsumexp, mean_logit)` of the shape of the labels."""
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
