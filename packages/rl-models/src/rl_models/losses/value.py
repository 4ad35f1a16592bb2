"""The losses of values: the critic's, and the labels of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_models.losses.terms import LossTerms, same_shape


def value_clip(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> LossTerms:
    """Compute half the squared error of the value, clipped around the old value, per token.

        term_t = 1/2 max((V_t - R_t)^2, (V_old_t + clip(V_t - V_old_t, -clip, clip) - R_t)^2)

    (Engstrom et al. 2020, arXiv:2005.12729, section 3, after the reference code of PPO.) The maximum of the two errors
    removes the gradient only where the value has already moved by `clip` in the right direction.

    Args:
        values: `[T]`, the value of the state before each token; receives the gradient.
        old_values: `[T]`, these values when the advantages were computed.
        returns: `[T]`, the targets (`gae(...).returns`).
        clip: The half-width of the interval. None: the plain squared error.

    Metrics: `value_clip_fraction`, and `value_error` (V - R)^2.

    Raises:
        ValueError: The shapes differ, or the clip is negative.
    """
    same_shape(values=values, old_values=old_values, returns=returns)
    if clip is not None and not clip >= 0:
        raise ValueError(f"clip={clip} must not be negative; use None for an unclipped value loss")
    old_values, returns = old_values.detach(), returns.detach()
    free = (values - returns).square()
    if clip is None:
        clipped = free
    else:
        clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    with torch.no_grad():
        metrics = {"value_clip_fraction": (clipped > free).float(), "value_error": free.detach()}
    return LossTerms(0.5 * torch.maximum(free, clipped), metrics)


def label_cross_entropy(values: Tensor, labels: Tensor) -> LossTerms:
    """Compute the cross-entropy of labels at given tokens, as for a process reward model (Lightman et al. 2023,
    arXiv:2305.20050).

        term_t = -log softmax(values_t)[labels_t]                 of L labels
        term_t = -log sigmoid(values_t) or -log sigmoid(-values_t)   of one number, labels 1 and 0

    Args:
        values: `[T, L]`, or `[T]` of one label, of a `Critic` on `batch.with_ends(labels)`; receives the gradient.
        labels: `[T]` integers, -100 for tokens without a label, whose terms are 0.

    Metrics: `label_accuracy`, the share of tokens whose label has the largest value.

    Raises:
        ValueError: The shapes differ, or a label is outside 0..L-1 (of one number: 0 and 1).
    """
    same_shape(labels=labels, values=values if values.dim() == 1 else values[:, 0])
    logits = values if values.dim() > 1 else torch.stack([torch.zeros_like(values), values], dim=1)
    labelled, classes = labels != -100, logits.shape[1]
    if wrong := labels[labelled & ((labels < 0) | (labels >= classes))].tolist():
        raise ValueError(f"labels {wrong[:8]} are outside 0..{classes - 1}; use -100 for tokens without a label")
    index = torch.where(labelled, labels, 0).long()
    terms = torch.where(labelled, -logits.log_softmax(-1).gather(1, index[:, None])[:, 0], 0)
    correct = labelled & (logits.argmax(-1) == index)
    return LossTerms(terms, {"label_accuracy": correct.to(terms).detach()})
