"""`LossInputs`: what a loss reads, the outputs of the model and the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rl_models.batch.batch import Batch


@dataclass(frozen=True)
class LossInputs:
    """The outputs of a model for each token of a micro-batch, with their gradients, and the micro-batch.

    Outputs are `[T]`, at the token that they belong to; outside of the mask they are 0 and carry no gradient.
    `inputs["advantages"]` is a field of the batch.

    Attributes:
        batch: The sequences of the micro-batch, with their mask and fields.
        outputs: The outputs of the role (`rl_models.backends.OUTPUTS`) by name.
    """

    batch: Batch
    outputs: Mapping[str, Tensor]

    @property
    def log_probs(self) -> Tensor:
        """`[T]`, the log-prob of each token under the policy that learns."""
        return self._output("log_probs")

    @property
    def entropy(self) -> Tensor:
        """`[T]`, the entropy of the distribution that each token comes from."""
        return self._output("entropy")

    @property
    def values(self) -> Tensor:
        """`[T]`, the value of the state before each token; with L labels `[T, L]`."""
        return self._output("values")

    def __getitem__(self, name: str) -> Tensor:
        return self.batch[name]

    def _output(self, name: str) -> Tensor:
        if name not in self.outputs:
            raise ValueError(f"the model has no {name}, only {', '.join(self.outputs)}; an ActorCritic has all outputs")
        return self.outputs[name]
