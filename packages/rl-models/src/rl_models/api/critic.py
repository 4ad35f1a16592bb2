"""`Critic`: a value function or a reward model."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from parallel_models import Role
from rl_models.api.worker import Worker
from rl_models.batch.batch import Batch, require_batch
from rl_models.calls.dispatch import dispatched, per_sequence, per_token
from rl_models.calls.passes import predict


class Critic(Worker):
    """A value model on a grid of ranks. Make one with `from_pretrained`; every rank of the grid calls it.

    The loss of `update` reads `values` of its `LossInputs`.
    """

    role: ClassVar[Role] = "value"

    @dispatched(per_token)
    def values(self, batch: Batch) -> Tensor:
        """Return the value of the state before each token, `[T]` fp32 without gradient; 0 for each first token.

        With L labels (`num_labels`) the result is `[T, L]`.
        """
        self._require("a forward pass")
        *_, values = predict(
            self.engine, batch, self.max_tokens_per_micro_batch, call=f"{type(self).__name__}.values",
            temperature=1.0, record_routing=False, values_only=True,
        )  # fmt: skip
        self._warn_of_length(batch)
        return values

    @dispatched(per_sequence)
    def rewards(self, batch: Batch) -> Tensor:
        """Return the value after the last token of each sequence, `[N]` fp32 without gradient; 0 without tokens.

        With L labels the result is `[N, L]`, such as L rewards.

        This is the reward of a reward model: a checkpoint of transformers' sequence classification,
        which a critic loads. Each sequence counts one token more towards `max_tokens_per_micro_batch`.
        """
        require_batch(batch)
        longer = batch.with_ends()
        return longer.sum_by_sequence(self.values(longer).to(batch.device)).to(self.device)
