"""`Critic`: a value model that estimates, and learns from, returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from rl_models.backends import Role
from rl_models.batch import Batch
from rl_models.losses import LossTerms
from rl_models.worker import Worker

# (values [T], batch) -> terms [T]
ValueLoss = Callable[[Tensor, Batch], LossTerms]


class Critic(Worker):
    """A value model on a grid of ranks. Make one with `from_pretrained`; every rank of the grid calls it."""

    role: ClassVar[Role] = "value"

    def values(self, batch: Batch) -> Tensor:
        """`[T]` fp32 without gradient: the value of the state before each token; 0 for the first of each sequence."""
        (values,) = self.predict(batch)
        return values

    def update(self, batch: Batch, loss: ValueLoss, *, aggregation: str = "token-mean") -> dict[str, float]:
        """One optimizer step on the batch; arguments, results and errors as for `Actor.update`."""
        return self.step(batch, lambda part, own: loss(own[0], part), aggregation=aggregation)
