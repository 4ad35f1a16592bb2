"""Advantages: the score less the mean of its group, without a division by the deviation (arXiv:2503.20783)."""

import torch
from torch import Tensor

from rl_models import Batch
from rl_train.options import TrainOptions


def centred(batch: Batch, scores: Tensor, groups: Tensor, options: TrainOptions) -> dict[str, Tensor]:
    """Return the advantage of each token `[T]`; `scores` and `groups` are `[N]`, one entry for each response."""
    counts = torch.bincount(groups)
    means = torch.zeros(len(counts)).index_add_(0, groups, scores) / counts
    advantages = scores - means[groups]
    return {"advantages": torch.where(batch.mask, advantages[batch.sequence_ids], 0)}
