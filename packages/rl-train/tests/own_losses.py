"""A loss of the tests, as a user would write it."""

from rl_models import LossInputs
from rl_models.losses import LossTerms
from rl_train.options.options import TrainOptions


def reinforce(inputs: LossInputs, options: TrainOptions) -> LossTerms:
    return LossTerms(-inputs.log_probs * inputs["advantages"], {"groups": float(inputs["group"].max()) + 1})
