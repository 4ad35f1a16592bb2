"""`NativeEngine`: the actor itself generates, on its own ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from parallel_models import SamplingOptions
from rl_models import Batch, Policy


class NativeEngine:
    """A `RolloutEngine` on the actor that learns: it needs no weight sync, and keeps no cache between calls.

    Args:
        actor: An `Actor` on one rank, `WholeBatches` or a `RayModelGroup`.
        **options: `exact`, `max_sequences` and `cache_gib` of `Actor.generate`.
    """

    def __init__(self, actor: Policy, **options: Any) -> None:
        self.actor, self.version, self._options = actor, 0, options

    def generate(self, prompts: Sequence[Tensor | Sequence[int]] | Batch, sampling: SamplingOptions) -> Batch:
        """See `RolloutEngine`."""
        return self.actor.generate(prompts, **vars(sampling), **self._options)

    def generate_async(
        self, prompts: Sequence[Tensor | Sequence[int]] | Batch, sampling: SamplingOptions
    ) -> Future[Batch]:
        """See `RolloutEngine`. The actor generates at once: it cannot learn at the same time."""
        future: Future[Batch] = Future()
        future.set_result(self.generate(prompts, sampling))
        return future

    def update_weights(self, actor: Policy, version: int) -> None:
        """See `RolloutEngine`; the actor has its own weights already.

        Raises:
            ValueError: The actor is another one.
        """
        if actor is not self.actor:
            raise ValueError("a NativeEngine generates with the actor it was built with; build another engine")
        self.version = version

    def close(self) -> None:
        """See `RolloutEngine`."""
