"""A loss of the tests, as a user would write it."""

from torch import Tensor

from rl_models import Batch
from rl_models.losses import LossTerms
from rl_train.options.options import TrainOptions


def reinforce(log_probs: Tensor, entropy: Tensor, batch: Batch, options: TrainOptions) -> LossTerms:
    return LossTerms(-log_probs * batch["advantages"], {"groups": float(batch["group"].max()) + 1})
