"""A policy loss: CISPO, which clips the importance weight and keeps the gradient of every token.

The source is MiniMax-M1 (arXiv:2506.13585, equation 4).
"""

from rl_models import LossInputs
from rl_models.losses import LossTerms
from rl_train.options import TrainOptions


def cispo(inputs: LossInputs, options: TrainOptions) -> LossTerms:
    """Return a term for each token of a micro-batch; all tensors are `[T]`."""
    weight = (inputs.log_probs - inputs["old_log_probs"]).exp().detach()
    clipped = weight.clamp(1 - options.objective.clip_low, 1 + options.objective.clip_high)
    terms = -clipped * inputs["advantages"] * inputs.log_probs
    return LossTerms(terms, {"clip_fraction": (weight != clipped).float()})
