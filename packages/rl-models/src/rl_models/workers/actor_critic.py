"""`ActorCritic`: a policy and its value function on one backbone, which learn together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple, overload

from torch import Tensor

from rl_models.batch import Batch
from rl_models.engines import Role
from rl_models.losses import LossTerms
from rl_models.workers.actor import Policy
from rl_models.workers.critic import Valuing
from rl_models.workers.dispatch import dispatched, for_all, per_token

# (log_probs [T], entropy [T], values [T], batch) -> terms [T]
JointLoss = Callable[[Tensor, Tensor, Tensor, Batch], LossTerms]


class TokenEstimates(NamedTuple):
    """All `[T]` fp32, aligned with the batch's tokens; zero for the first token of each sequence."""

    log_probs: Tensor
    entropy: Tensor
    values: Tensor


class RoutedEstimates(NamedTuple):
    """`TokenEstimates`, and the experts `[T, M, k]` int16 that each token went to in the M layers of a mixture."""

    log_probs: Tensor
    entropy: Tensor
    values: Tensor
    routing: Tensor


class ActorCritic(Policy, Valuing):
    """A causal language model with a value head, on a grid of ranks.

    The policy and the value function share one set of layers: half the weights and optimizer states of an `Actor` and a
    `Critic`, and one forward and backward for both. `from_pretrained` loads a checkpoint with both heads, or a causal
    language model, which gets a value head of zeros; every rank of the grid calls it.

    `save_pretrained` adds `score.weight` and `score.bias` to the checkpoint of a causal language model with one label.
    `AutoModelForCausalLM`, `AutoModelForTokenClassification`, `Actor` and `Critic` read it, each with its own head.
    """

    role: ClassVar[Role] = "causal_lm_with_value"

    @overload
    def estimate(
        self, batch: Batch, *, temperature: float = ..., record_routing: Literal[False] = ...
    ) -> TokenEstimates: ...

    @overload
    def estimate(self, batch: Batch, *, temperature: float = ..., record_routing: Literal[True]) -> RoutedEstimates: ...

    @dispatched(per_token)
    def estimate(
        self, batch: Batch, *, temperature: float = 1.0, record_routing: bool = False
    ) -> TokenEstimates | RoutedEstimates:
        """Return log-probabilities, entropies and values of one forward pass; arguments and errors as for `log_probs`.

        `log_probs` alone or `values` alone costs as much: every forward pass computes both heads.
        """
        found = self.predict(batch, temperature=temperature, record_routing=record_routing)
        return RoutedEstimates(**found) if record_routing else TokenEstimates(**found)

    @dispatched(for_all, changes=True, needs="optimizer")
    def update(
        self, batch: Batch, loss: JointLoss, *, temperature: float = 1.0, aggregation: str = "token-mean"
    ) -> dict[str, float]:
        """Take one optimizer step on the batch, for the policy and the values together.

        The loss is one sum, such as `policy + 0.5 * value`, of terms that read the log-probabilities, the entropies and
        the values of one forward pass; terms add and scale (`LossTerms`). Everything else is as for `Actor.update`.
        """
        return self.step(batch, loss, aggregation=aggregation, temperature=temperature)

    def stream_weights(self, *, value_head: bool = False, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the language model, for an inference engine.

        Args:
            value_head: Yield `score.weight` and `score.bias`, too.
            **options: `to`, `dtype`, `device` and `bucket_bytes`, as for `Actor.stream_weights`.
        """
        tensors = super().stream_weights(**options)
        return (pair for pair in tensors if value_head or not pair[0].startswith("score."))
