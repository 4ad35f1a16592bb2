"""What the routers' losses need to know of a whole batch before its first gradient: above all, who goes where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_layers import PackedSequence
from parallel_layers.moe import BatchTotals, RouterReplay, RoutingContext
from rl_models.engines.engine import Outputs
from rl_models.engines.parallel.stage import Stage, Task
from rl_models.grid import Grid
from rl_models.models.language_models import PackedModel


class LoadCounter:
    """Runs a model up to its head, and counts.

    Args:
        model: of this rank.
        replays: of each micro-batch; None: the routers choose.
        num_outputs: of the model.
    """

    def __init__(self, model: PackedModel, replays: Sequence[RouterReplay] | None, num_outputs: int) -> None:
        self.model, self.replays, self.num_outputs = model, replays, num_outputs
        self._contexts: list[RoutingContext] = []

    def task(self, stage: Stage, number: int, packed: PackedSequence) -> Task:
        """What a stage does with a micro-batch: hidden states, or zeros in the place of the last one's outputs."""

        def task(hidden: Tensor | None) -> Tensor | Outputs:
            context = RoutingContext.of(packed, replay=None if self.replays is None else self.replays[number])
            self._contexts.append(context)
            states: Tensor = self.model(packed, hidden, chunk=stage.chunk, routing=context)
            if not stage.chunk.last:
                return states
            return (torch.zeros(packed.num_tokens, device=states.device),) * self.num_outputs

        return task

    @property
    def loads(self) -> dict[int, Tensor]:
        """Layer of this rank -> `[E]` fp32, of this rank's tokens."""
        sums: dict[int, Tensor] = {}
        for context in self._contexts:
            for layer, load in context.loads.items():
                sums[layer] = sums[layer] + load if layer in sums else load
        return sums


def batch_totals(micro_batches: Sequence[PackedSequence], loads: Mapping[int, Tensor], grid: Grid) -> BatchTotals:
    """Add up what the ranks have of a batch. Communication: two small all-reduces.

    Args:
        micro_batches: of this data-parallel rank.
        loads: of this rank's tokens.
        grid: where the model stands.
    """
    tokens = torch.tensor(sum(packed.num_tokens - packed.padding for packed in micro_batches), device=grid.device)
    sequences = [(packed.cu_seqlens.diff()[: packed.num_sequences] > 0).sum() for packed in micro_batches]
    counts = torch.stack([tokens, torch.stack(sequences).sum()])
    if (group := grid.group("dp")) is not None:
        dist.all_reduce(counts, group=group)
    layers = sorted(loads)
    if layers and grid.data_mesh is not None and grid.data_mesh.size() > 1:
        table_ME = torch.stack([loads[layer] for layer in layers])
        dist.all_reduce(table_ME, group=grid.data_mesh.get_group())
        loads = dict(zip(layers, table_ME.unbind(), strict=True))
    return BatchTotals(num_tokens=counts[0], num_sequences=counts[1], loads=loads, context_group=grid.group("cp"))
