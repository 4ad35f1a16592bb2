"""`ActorCritic`: a policy and its value function on one backbone, which learn together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from parallel_models import Role
from rl_models.api.actor import Actor
from rl_models.api.critic import Critic


class ActorCritic(Actor, Critic):
    """A causal language model with a value head, on a grid of ranks.

    The policy and the value function share one set of layers: half the weights and optimizer states of an `Actor` and a
    `Critic`, and one forward and backward for both. `from_pretrained` loads a checkpoint with both heads, or a causal
    language model, which gets a value head of zeros; every rank of the grid calls it.

    `save_pretrained` adds `score.weight` and `score.bias` to the checkpoint of a causal language model with one label.
    `AutoModelForCausalLM`, `AutoModelForTokenClassification`, `Actor` and `Critic` read it, each with its own head.

    `predict` returns the outputs of both heads from one pass, and `update` computes both. `values` and `rewards` run no
    GEMM of the vocabulary on backend="parallel".
    The loss of `update` reads `log_probs`, `entropy` and `values` of its `LossInputs` and returns one sum, such as
    `policy + 0.5 * value`.
    """

    role: ClassVar[Role] = "causal_lm_with_value"

    def stream_weights(self, *, value_head: bool = False, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the language model, for an inference engine.

        Args:
            value_head: Yield `score.weight` and `score.bias`, too.
            **options: As for `Actor.stream_weights`.
        """
        tensors = super().stream_weights(**options)
        return (pair for pair in tensors if value_head or not pair[0].startswith("score."))
