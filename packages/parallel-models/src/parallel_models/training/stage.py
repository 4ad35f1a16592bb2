"""`Stage`: one chunk of a model as FSDP2 and a pipeline call it, and the tasks that it does for a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_layers import PackedSequence
from parallel_layers.moe import BatchTotals, RoutingContext
from parallel_models.engine.engine import MicroBatch, Outputs
from parallel_models.engine.grid import Grid
from parallel_models.engine.vision import Vision, Visual
from parallel_models.model.decoder import Chunk, VisualStates
from parallel_models.model.packed_model import PackedModel

# The result of the chunk before (None in the first chunk) -> the input of the next chunk, or the outputs.
Task = Callable[[Tensor | None], Any]


class Stage(nn.Module):
    """The parameters of one of a model's chunks, and a `forward` that runs the next of its tasks.

    FSDP2 and torch's pipelines need one fixed `forward`; tasks adapt calls with varying arguments to it.
    """

    def __init__(self, model: PackedModel, chunk: Chunk, vision: Vision | None = None) -> None:
        super().__init__()
        self.chunk = chunk
        self.vision = vision if chunk.first else None
        self.blocks = nn.ModuleList(model.model.layers[str(i)] for i in chunk.layers)
        mtp = getattr(model, "mtp", None) if chunk.last else None
        ends: list[nn.Module] = [model.model.embed_tokens] if chunk.first else []
        if chunk.first and model.model.per_layer is not None:
            ends.append(model.model.per_layer)
        if str(chunk.layers[0]) in model.model.per_layer_tables:
            ends.append(model.model.per_layer_tables[str(chunk.layers[0])])
        if self.vision is not None and self.vision.tower is not None:
            ends.append(self.vision.tower)
        if chunk.last:
            ends += [model.model.norm, *(getattr(model, name) for name in ("lm_head", "score") if hasattr(model, name))]
        if mtp is not None:
            self.blocks.extend(mtp.layers.values())
            ends += [mtp.embed_tokens] if hasattr(mtp, "embed_tokens") else []
        self.ends = nn.ModuleList(ends)
        self._tasks: Iterator[Task] = iter(())

    def see(self, packed: PackedSequence, visual: Visual, *, separate_packs: bool = False) -> VisualStates | None:
        """Return the vision tower's output for the images of a pack, on the first stage; see `Vision.states`."""
        return None if self.vision is None else self.vision.states(packed, visual, separate_packs=separate_packs)

    def give(self, tasks: Iterable[Task]) -> None:
        """Set the tasks of the next calls of `forward`, one each."""
        self._tasks = iter(tasks)

    def run(self, task: Task, hidden: Tensor | None = None) -> Any:
        """Do one task."""
        self.give([task])
        return self(hidden)

    def forward(self, hidden: Tensor | None = None) -> Any:
        """Do the next task."""
        return next(self._tasks)(hidden)


def compute(
    model: PackedModel,
    totals: BatchTotals | None,
    stage: Stage,
    micro_batch: MicroBatch,
    hidden: Tensor | None,
    *,
    further: bool = False,
) -> Tensor | Outputs:
    """Compute hidden states, or on the last stage the outputs, from the hidden states of the stage before.

    `totals` are the batch's totals for the routers' losses; None: no such losses. The replay of `micro_batch` is this
    rank's part. `further`: see `PackedModel.outputs`.
    """
    packed, chunk, routing = micro_batch.packed, stage.chunk, None
    if totals is not None or micro_batch.replay is not None:
        routing = RoutingContext.of(packed, replay=micro_batch.replay, totals=totals)
    visual = stage.see(micro_batch.packed, micro_batch.visual)
    if not chunk.last or micro_batch.returns_states:
        states: Tensor = model(packed, hidden, chunk=chunk, routing=routing, visual=visual)
        return (model.whole_states(states),) if chunk.last else states
    return model.outputs(
        packed,
        hidden,
        chunk=chunk,
        temperature=micro_batch.temperature,
        sampling_mask=micro_batch.sampling_mask,
        routing=routing,
        further=further,
        visual=visual,
        shared=micro_batch.shared,
        distillation=micro_batch.distillation,
        top_n=micro_batch.top_n,
        values_only=micro_batch.values_only,
    )


def count_loads(
    model: PackedModel,
    num_outputs: int,
    contexts: list[RoutingContext],
    stage: Stage,
    micro_batch: MicroBatch,
    hidden: Tensor | None,
) -> Tensor | Outputs:
    """Compute hidden states, or on the last stage zeros in place of the `num_outputs` outputs.

    `contexts` gets a context with the tokens of each expert; see `compute` for the other arguments.
    """
    contexts.append(RoutingContext.of(micro_batch.packed, replay=micro_batch.replay))
    visual = stage.see(micro_batch.packed, micro_batch.visual)
    states: Tensor = model(micro_batch.packed, hidden, chunk=stage.chunk, routing=contexts[-1], visual=visual)
    if not stage.chunk.last:
        return states
    zeros = torch.zeros(micro_batch.packed.num_tokens, dtype=model.output_dtype, device=states.device)
    return (zeros,) * num_outputs


def batch_totals(micro_batches: Sequence[MicroBatch], contexts: Sequence[RoutingContext], grid: Grid) -> BatchTotals:
    """Return the totals of a batch over all ranks, from the contexts of `count_loads` of this rank's tokens.

    Communication: two small all-reduces.
    """
    packs = [micro_batch.packed for micro_batch in micro_batches]
    tokens = torch.tensor(sum(packed.num_tokens - packed.padding for packed in packs), device=grid.device)
    sequences = [(packed.cu_seqlens.diff()[: packed.num_sequences] > 0).sum() for packed in packs]
    counts = torch.stack([tokens, torch.stack(sequences).sum()])
    if (group := grid.group("dp")) is not None:
        dist.all_reduce(counts, group=group)
    loads: dict[int, Tensor] = {}  # layer -> tokens of each expert [E]
    for context in contexts:
        for layer, load in context.loads.items():
            loads[layer] = loads[layer] + load if layer in loads else load
    layers = sorted(loads)
    if layers and grid.data_mesh is not None and grid.data_mesh.size() > 1:
        table_ME = torch.stack([loads[layer] for layer in layers])
        dist.all_reduce(table_ME, group=grid.data_mesh.get_group())
        loads = dict(zip(layers, table_ME.unbind(), strict=True))
    return BatchTotals(num_tokens=counts[0], num_sequences=counts[1], loads=loads, context_group=grid.group("cp"))
