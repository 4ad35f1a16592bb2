"""`Call`: what one call of the native engine does with every micro-batch, as tasks for its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from parallel_layers import PackedSequence
from parallel_layers.moe import BatchTotals, RouterReplay, RoutingContext
from rl_models.engines.engine import Outputs
from rl_models.engines.parallel.stage import Stage, Task
from rl_models.models.language_models import PackedModel


@dataclass(frozen=True)
class Call:
    """What one call of an engine does with every micro-batch.

    Attributes:
        model: of this rank.
        temperature: of the logits.
        replays: of this rank's part of each micro-batch; None: the routers choose, and nothing is recorded.
        totals: of the batch that the routers' losses are of; None: there are none.
    """

    model: PackedModel
    temperature: float
    replays: Sequence[RouterReplay] | None
    totals: BatchTotals | None = None

    def task(self, stage: Stage, number: int, packed: PackedSequence) -> Task:
        """What a stage does with a micro-batch: hidden states, or the outputs of the last."""

        def task(hidden: Tensor | None) -> Tensor | Outputs:
            model, chunk = self.model, stage.chunk
            routing = self._routing(number, packed)
            if not chunk.last:
                states: Tensor = model(packed, hidden, chunk=chunk, routing=routing)
                return states
            return model.outputs(packed, hidden, chunk=chunk, temperature=self.temperature, routing=routing)

        return task

    def _routing(self, number: int, packed: PackedSequence) -> RoutingContext | None:
        if self.totals is None and self.replays is None:
            return None
        replay = None if self.replays is None else self.replays[number]
        return RoutingContext.of(packed, replay=replay, totals=self.totals)
