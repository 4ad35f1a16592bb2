"""A policy loss: CISPO, which clips the importance weight and keeps the gradient of every token.

The source is MiniMax-M1 (arXiv:2506.13585, equation 4).
"""

from torch import Tensor

from rl_models import Batch
from rl_models.losses import LossTerms
from rl_train.options import TrainOptions


def cispo(log_probs: Tensor, entropy: Tensor, batch: Batch, options: TrainOptions) -> LossTerms:
    """Return a term for each token of a micro-batch; all tensors are `[T]`."""
    weight = (log_probs - batch["old_log_probs"]).exp().detach()
    clipped = weight.clamp(1 - options.objective.clip_low, 1 + options.objective.clip_high)
    terms = -clipped * batch["advantages"] * log_probs
    return LossTerms(terms, {"clip_fraction": (weight != clipped).float()})
