"""The tasks of the native engine's stages for a micro-batch: compute outputs, or count the tokens of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_layers.moe import BatchTotals, RoutingContext
from rl_models.engines.engine import Outputs
from rl_models.engines.micro_batch import MicroBatch
from rl_models.engines.parallel.stage import Stage, Task
from rl_models.grid import Grid
from rl_models.models.language_models import PackedModel


def compute(model: PackedModel, totals: BatchTotals | None, stage: Stage, micro_batch: MicroBatch) -> Task:
    """Return the task that computes hidden states, or on the last stage the outputs.

    Args:
        model: This rank's model.
        totals: The totals of the batch for the routers' losses; None: no such losses.
        stage: One of the model's stages.
        micro_batch: With this rank's part of the replay.
    """

    def task(hidden: Tensor | None) -> Tensor | Outputs:
        packed, chunk, routing = micro_batch.packed, stage.chunk, None
        if totals is not None or micro_batch.replay is not None:
            routing = RoutingContext.of(packed, replay=micro_batch.replay, totals=totals)
        if not chunk.last:
            states: Tensor = model(packed, hidden, chunk=chunk, routing=routing)
            return states
        return model.outputs(packed, hidden, chunk=chunk, temperature=micro_batch.temperature, routing=routing)

    return task


class LoadCounter:
    """Run a model up to its head, and count the tokens of each expert.

    Args:
        model: This rank's model.
        num_outputs: The number of the model's outputs.
    """

    def __init__(self, model: PackedModel, num_outputs: int) -> None:
        self.model, self.num_outputs = model, num_outputs
        self._contexts: list[RoutingContext] = []

    def task(self, stage: Stage, micro_batch: MicroBatch) -> Task:
        """Return the task that computes hidden states, or on the last stage zeros in place of the outputs."""

        def task(hidden: Tensor | None) -> Tensor | Outputs:
            packed = micro_batch.packed
            context = RoutingContext.of(packed, replay=micro_batch.replay)
            self._contexts.append(context)
            states: Tensor = self.model(packed, hidden, chunk=stage.chunk, routing=context)
            if not stage.chunk.last:
                return states
            return (torch.zeros(packed.num_tokens, device=states.device),) * self.num_outputs

        return task

    @property
    def loads(self) -> dict[int, Tensor]:
        """Each layer of this rank -> the load of each expert `[E]` fp32 by this rank's tokens."""
        sums: dict[int, Tensor] = {}
        for context in self._contexts:
            for layer, load in context.loads.items():
                sums[layer] = sums[layer] + load if layer in sums else load
        return sums


def batch_totals(micro_batches: Sequence[MicroBatch], loads: Mapping[int, Tensor], grid: Grid) -> BatchTotals:
    """Return the totals of a batch over all ranks. Communication: two small all-reduces.

    Args:
        micro_batches: This data-parallel rank's micro-batches.
        loads: Layer -> tokens of each expert `[E]`, of this rank's tokens.
        grid: Where the model stands.
    """
    packs = [micro_batch.packed for micro_batch in micro_batches]
    tokens = torch.tensor(sum(packed.num_tokens - packed.padding for packed in packs), device=grid.device)
    sequences = [(packed.cu_seqlens.diff()[: packed.num_sequences] > 0).sum() for packed in packs]
    counts = torch.stack([tokens, torch.stack(sequences).sum()])
    if (group := grid.group("dp")) is not None:
        dist.all_reduce(counts, group=group)
    layers = sorted(loads)
    if layers and grid.data_mesh is not None and grid.data_mesh.size() > 1:
        table_ME = torch.stack([loads[layer] for layer in layers])
        dist.all_reduce(table_ME, group=grid.data_mesh.get_group())
        loads = dict(zip(layers, table_ME.unbind(), strict=True))
    return BatchTotals(num_tokens=counts[0], num_sequences=counts[1], loads=loads, context_group=grid.group("cp"))
