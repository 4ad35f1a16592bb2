"""Pipelines over torch.distributed.pipelining: its stages and schedules, fed with packed micro-batches.

torch's stages exchange tensors of one shape in a call, so the engine pads all micro-batches to the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.module import is_dtensor
from parallel_models.engine.engine import OUTPUTS, MicroBatch, Outputs
from parallel_models.engine.options import PipelineOptions
from parallel_models.model.packed_model import PackedModel
from parallel_models.training.stage import Stage, Task

# torch's pipelines and its compiler take over a second to import; only models with a pipeline import them.
if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

# (stage, micro-batch) -> the computation of the stage on the micro-batch.
# The computation of a micro-batch on a stage, from the hidden states of the stage before.
Computation = Callable[[Stage, MicroBatch, Tensor | None], Any]


def why_no_zero_bubble() -> str | None:
    """Return why this torch cannot run the zero-bubble schedule; None if it can.

    The schedule computes the gradients of weights from nodes in the middle of the graph. torch 2.11 and 2.12 have freed
    the nodes of custom autograd functions by then.
    """
    if torch.torch_version.TorchVersion(torch.__version__) >= "2.13":
        return None
    return f"schedule='zero-bubble' needs torch 2.13 or newer, not {torch.__version__}; use '1f1b'"


class Pipeline:
    """The stages of one rank of a pipeline: the rank's chunks of the model, in order.

    The model has `num_outputs` outputs, each `[T]` of its `output_dtype`, and for a loss `further` more.

    Raises:
        ValueError: `why_no_zero_bubble`.
    """

    def __init__(
        self,
        model: PackedModel,
        stages: Sequence[Stage],
        group: ProcessGroup,
        options: PipelineOptions,
        device: torch.device,
        num_outputs: int,
        further: int = 0,
    ) -> None:
        self.model, self.stages, self.group, self.device = model, stages, group, device
        self.num_outputs, self.further = num_outputs, further
        self.dtype = model.dtype
        if options.schedule == "zero-bubble" and (reason := why_no_zero_bubble()) is not None:
            raise ValueError(reason)
        from torch.distributed.pipelining import schedules

        self._single = options.schedule == "1f1b" and len(stages) == 1
        self._schedule_class: Any = schedules.ScheduleInterleavedZeroBubble
        if options.schedule == "1f1b":
            self._schedule_class = schedules.Schedule1F1B if self._single else schedules.ScheduleInterleaved1F1B

    def forward(self, micro_batches: Sequence[MicroBatch], computation: Computation) -> list[Outputs]:
        """Return the outputs of micro-batches of one length on every rank, without a graph.

        Communication: one broadcast of the outputs.
        """
        with torch.no_grad():
            last_outputs = self._run(micro_batches, computation, None)
            first, *others = self._outputs(micro_batches[0], learns=False)
            shape = (1 + len(others), len(micro_batches), *first.shape)
            result = torch.empty(shape, dtype=first.dtype, device=self.device)
            if last_outputs is not None:
                torch.stack(last_outputs, out=result.flatten(1, 2))
            dist.broadcast(result, group=self.group, group_src=self.group.size() - 1)
        return [tuple(outputs) for outputs in result.unbind(1)]

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], computation: Computation, loss: Callable[[int, Outputs], Tensor]
    ) -> None:
        """Add up the gradients of the losses: number of a micro-batch and its outputs on the last stage -> scalar."""
        self._run(micro_batches, computation, lambda outputs, number: loss(int(number), _tuple(outputs)))

    def _run(
        self, micro_batches: Sequence[MicroBatch], computation: Computation, loss: Callable[..., Tensor] | None
    ) -> tuple[Tensor, ...] | None:
        """Run torch's schedule; without a loss, return the last stage's outputs, one after the other."""
        num_tokens = micro_batches[0].packed.num_tokens
        for stage in self.stages:
            stage.give([partial(_dense, partial(computation, stage, micro_batch)) for micro_batch in micro_batches])
        outputs = self._outputs(micro_batches[0], learns=loss is not None)
        stages = [self._torch_stage(stage, number, num_tokens, outputs) for number, stage in enumerate(self.stages)]
        count = len(micro_batches)
        schedule = self._schedule_class(stages[0] if self._single else stages, count, loss_fn=loss, scale_grads=False)
        target = None if loss is None else torch.arange(count)
        results = schedule.step(target=target, return_outputs=loss is None)
        return None if results is None else _tuple(results)

    def _outputs(self, micro_batch: MicroBatch, *, learns: bool) -> tuple[Tensor, ...]:
        """Return tensors without memory, like the last stage's outputs for each micro-batch of a call."""
        num_tokens = micro_batch.packed.num_tokens
        if micro_batch.returns_states:
            return (torch.empty(num_tokens, self.model.config.decoder.hidden_size, dtype=self.dtype, device="meta"),)
        if micro_batch.top_n:
            columns = 3 + 2 * micro_batch.top_n
            return (torch.empty(num_tokens, columns, dtype=self.model.output_dtype, device="meta"),)
        count = self.num_outputs + (micro_batch.distillation is not None) + self.further * learns
        count -= len(OUTPUTS["causal_lm"]) * micro_batch.values_only
        dtype = self.model.output_dtype
        return (torch.empty(num_tokens, dtype=dtype, device="meta", requires_grad=True),) * count

    def _torch_stage(self, stage: Stage, number: int, num_tokens: int, outputs: tuple[Tensor, ...]) -> PipelineStage:
        from torch.distributed.pipelining import PipelineStage

        # With these shapes torch needs no extra forward to infer them.
        layers = stage.chunk.layers
        chunk_input, chunk_output = (
            torch.empty(
                self.model.boundary_shape(num_tokens, layer), dtype=self.dtype, device="meta", requires_grad=True
            )
            for layer in (layers[0], layers[-1] + 1)
        )
        size = self.group.size()
        return PipelineStage(
            stage,
            number * size + self.group.rank(),
            size * len(self.stages),
            self.device,
            input_args=() if stage.chunk.first else (chunk_input,),
            output_args=outputs if stage.chunk.last else (chunk_output,),
            group=self.group,
        )

    def relay(
        self, model: PackedModel, num_tokens: int, run: Callable[[Stage, Tensor | None], Tensor]
    ) -> Tensor | None:
        """Pass once through all stages, without a schedule; return the result of `run` on the last stage, else None.

        Layers have caches and take `num_tokens` tokens; `run` maps a stage and its input to its output, by this model
        or a view of it.
        """
        rank, size = self.group.rank(), self.group.size()
        result: Tensor | None = None
        for stage in self.stages:
            hidden = None
            if not stage.chunk.first:
                shape = model.boundary_shape(num_tokens, stage.chunk.layers[0], cached=True)
                hidden = torch.empty(shape, dtype=self.dtype, device=self.device)
                dist.recv(hidden, group=self.group, group_src=(rank - 1) % size)
            result = run(stage, hidden)
            if not stage.chunk.last:
                dist.send(result, group=self.group, group_dst=(rank + 1) % size)
                result = None
        return result


@contextmanager
def tied_gradients(embedding: nn.Parameter | None, group: ProcessGroup) -> Iterator[None]:
    """Sum the gradients that the body adds to an embedding that the first and the last stage hold, to the same bits.

    `embedding` is this rank's copy, None on the other stages. Communication: the gradient, once each way.
    """
    if embedding is None:
        yield
        return
    # Earlier gradients are sums already.
    earlier, embedding.grad = embedding.grad, None
    yield
    if embedding.grad is None:
        return
    with torch.no_grad():
        gradient = embedding.grad.to_local() if is_dtensor(embedding.grad) else embedding.grad
        peer_gradient = torch.empty_like(gradient)
        peer = group.size() - 1 - group.rank()
        for request in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, gradient.clone(), group=group, group_peer=peer),
                dist.P2POp(dist.irecv, peer_gradient, group=group, group_peer=peer),
            ]
        ):
            request.wait()
        gradient.add_(peer_gradient)
        if earlier is not None:
            embedding.grad += earlier


def _dense(task: Task, hidden: Tensor | None) -> Any:
    """Run a task and make its results contiguous, as `_torch_stage` announces them: torch 2.11 compares strides."""
    outputs = task(hidden)
    return tuple(output.contiguous() for output in outputs) if isinstance(outputs, tuple) else outputs.contiguous()


def _tuple(outputs: Any) -> Outputs:
    return outputs if isinstance(outputs, tuple) else (outputs,)
