"""`RolloutEngine`: the interface of an engine that generates for a run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from rl_models.batch import Batch
from rl_models.workers.generation import SamplingOptions


class RolloutEngine(Protocol):
    """An engine that draws responses with the weights of an actor.

    All ranks of a run call each method, in the same order and with the same arguments; under Ray the one process of
    the loop does. An engine of your own has these methods and this attribute, and nothing else is asked of it.

    Attributes:
        version: The version of the weights that the next responses are drawn with.
    """

    version: int

    def generate(self, prompts: Sequence[Tensor | Sequence[int]], sampling: SamplingOptions) -> Batch:
        """Return each prompt with its `sampling.n` responses, prompt by prompt.

        Returns:
            The responses are in the mask. The field `log_probs` `[T]` holds the sampler's own log-prob of each response
            token at `sampling.temperature`, before top-k and top-p; 0 elsewhere.

        Raises:
            ValueError: A prompt or an option is wrong, or logits are not finite.
            RuntimeError: The engine sleeps, or its last update of the weights broke off.
        """
        ...

    def generate_async(self, prompts: Sequence[Tensor | Sequence[int]], sampling: SamplingOptions) -> Future[Batch]:
        """Return a future of `generate`; an engine on devices of its own works on it in the meantime.

        All ranks call `result` of their futures in the order of the calls, and before the next `update_weights`.
        """
        ...

    def update_weights(self, actor: Any, version: int) -> None:
        """Take the weights of an actor; all its ranks call the method. Later responses are drawn with them.

        Args:
            actor: An `Actor`, `WholeBatches` or `RayModelGroup`, whose `stream_weights` gives the tensors.
            version: The version of these weights.

        Raises:
            RuntimeError: The update broke off; the engine refuses to generate until an update succeeds.
        """
        ...

    def sleep(self) -> None:
        """Give back the devices' memory until `wake`."""
        ...

    def wake(self) -> None:
        """Take the devices' memory again; the weights are those of the last update."""
        ...

    def close(self) -> None:
        """End the engine and its processes."""
        ...
