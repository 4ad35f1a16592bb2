"""Find the modules of a model that draw random numbers in training mode: dropout, and the jitter of routers.

Learning compares log-probs of a policy with log-probs of the same policy earlier. Dropout makes the two differ for the
same weights, and packed attention cannot apply dropout at all.
"""

import re

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_RATE = re.compile(r"dropout|jitter")


class RandomParts:
    """The rates of dropout and jitter in a model, by module and attribute."""

    def __init__(self, model: nn.Module) -> None:
        self.rates = [
            (f"{name}.{attribute}".lstrip("."), module, attribute)
            for name, module in model.named_modules()
            for attribute, value in vars(module).items()
            if isinstance(value, float)
            and (_RATE.search(attribute) or (attribute == "p" and isinstance(module, _DropoutNd)))
        ]

    @torch.compiler.disable
    def refuse_active(self) -> None:
        """Refuse modules in training mode whose rate is above 0.

        Raises:
            ValueError: Names the modules and their rates.
        """
        active = [
            f"{name}={rate}"
            for name, module, attribute in self.rates
            if module.training and (rate := getattr(module, attribute)) > 0
        ]
        if active:
            others = f" and {len(active) - 3} more" if len(active) > 3 else ""
            raise ValueError(
                f"in training mode this model draws random numbers ({', '.join(active[:3])}{others}), so its log-probs "
                "would change with each call; load the model with these rates at 0.0, or call model.eval()"
            )
