"""`MegatronEngine`: a GPTModel of Megatron-Core as an actor or a critic calls it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ckpt
from megatron_utils import MegatronGrid, complete_recordings, megatron_device, moe_layers
from megatron_utils.gpt import PackedGPTModel, same_draws
from megatron_utils.optimizer import gradient_buffers, wrap_data_parallel
from megatron_utils.pipeline_parallel import run_schedule
from parallel_layers import LogProbs, PackedSequence, next_token_labels
from parallel_layers.data import pack_micro_batches
from parallel_layers.inference import SequenceCache
from parallel_layers.memory import HostOffload
from parallel_models import CacheOptions, Decoding, Engine, Grid, MicroBatch, OptimizerOptions, Outputs, Shards
from parallel_models.engine import Loss
from rl_models.backends.megatron.optimizer import MegatronOptimizer
from rl_models.backends.options import MegatronOptions
from rl_models.batch.visual import Visual

_MODULE = re.compile(r"\bconv1d_(weight|bias)$")


class MegatronEngine(Engine):
    """A GPTModel divided over tp, pp (with virtual stages), cp and ep, and whole on every data-parallel rank.

    `chunks` are this rank's pipeline chunks, which `module` holds, with a place each in `layout`.
    """

    def __init__(
        self,
        chunks: Sequence[PackedGPTModel],
        layout: ckpt.Layout,
        places: Sequence[ckpt.Place],
        grid: Grid,
        enter: Callable[[], AbstractContextManager[MegatronGrid]],
        options: MegatronOptions,
        adapters: ckpt.AdapterLayout | None = None,
    ) -> None:
        self.chunks, self._enter = list(chunks), enter
        self.module = nn.ModuleList(chunks)
        self.layout, self.places, self.grid = layout, list(places), grid
        self.num_labels = layout.num_labels
        self.adapter_layout = adapters
        self.vocab_size = chunks[0].true_vocab_size
        self.tokens_multiple_of = chunks[0].tokens_multiple_of
        self.micro_batches_multiple_of = grid.dims.pp if len(chunks) > 1 else 1
        self.routed_layers = moe_layers(chunks[0].config)
        self.num_experts = int(chunks[0].config.num_moe_experts or 0)
        self.distributed_optimizer = options.distributed_optimizer and grid.dims.dp * grid.dims.cp > 1
        self._scale_loss: Callable[[Tensor], Tensor] | None = None
        self._trained: list[Any] | None = None
        self._gradient_memory = HostOffload()

    @contextmanager
    def entered(self) -> Iterator[MegatronGrid]:
        """Enter Megatron's global state for this grid; refuses a wrong device, or another `megatron_grid` around it."""
        check_device(self.grid.device)
        with self._enter() as megatron:
            yield megatron

    def trained(self, megatron: MegatronGrid) -> list[Any]:
        """Return the chunks with buffers for gradients, which the first call makes: a reference model has none."""
        if self._trained is None:
            self._trained = wrap_data_parallel(self.chunks, megatron, distributed=self.distributed_optimizer)
        return self._trained

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Outputs]:
        """Return the outputs of every micro-batch."""
        with self.entered() as megatron, torch.no_grad():
            outputs = self._run(self.chunks, micro_batches, megatron)
        return [_outputs(output) for output in outputs]

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Add the gradient of the losses; with a divided optimizer each rank has its part of the gradient."""

        def total(output: Any, number: int) -> Tensor:
            # Megatron averages over the data-parallel ranks; the gradient here is their sum.
            return loss(micro_batches[number], _outputs(output)) * self.grid.dims.dp

        with self.entered() as megatron, self.dropout(), same_draws():
            chunks = self.trained(megatron)
            self._gradient_memory.onload()
            self._run(chunks, micro_batches, megatron, loss=total, grad_scale=self._scale_loss, broadcast=False)

    def _run(
        self, chunks: Sequence[Any], micro_batches: Sequence[MicroBatch], megatron: MegatronGrid, **options: Any
    ) -> Sequence[Any]:
        """Run Megatron's schedule; return the last stage's results."""
        packs = [micro_batch.packed for micro_batch in micro_batches]
        replays = [micro_batch.replay for micro_batch in micro_batches if micro_batch.replay is not None]
        if self.layout.role == "causal_lm":
            # All micro-batches of a call have one temperature.
            options |= {"labels": [next_token_labels(packed) for packed in packs]}
            masks = [batch.sampling_mask for batch in micro_batches if batch.sampling_mask is not None]
            options |= {"temperature": micro_batches[0].temperature, "sampling_masks": masks or None}
        outputs = run_schedule(chunks, packs, megatron, routing=replays or None, **options)
        if replays and replays[0].recording:
            complete_recordings(replays, packs, self.chunks[0].config, megatron)
        return outputs or ()

    def build_optimizer(self, options: OptimizerOptions) -> MegatronOptimizer:
        """Return Megatron's AdamW; from now on its loss scale, if any, multiplies gradients."""
        with self.entered() as megatron:
            chunks = self.trained(megatron)
        optimizer = MegatronOptimizer(
            chunks,
            options,
            self.entered,
            distributed=self.distributed_optimizer,
            drop_gradients=self.drop_gradients,
        )
        self._scale_loss = None if optimizer.loss_scale is None else optimizer.inner.scale_loss
        return optimizer

    def drop_gradients(self) -> None:
        """Drop the gradients, and give up their memory until the next `forward_backward`."""
        for parameter in self.module.parameters():
            parameter.grad = None
        if not self._gradient_memory.offloaded:
            self._gradient_memory.offload([], discard=gradient_buffers(self._trained or []))

    def shards(self) -> Shards:
        """Return the parameters of this rank without adapters, and the routers' biases."""
        return self._shards(self.layout)

    def adapters(self) -> Shards | None:
        """See `Engine`."""
        return None if self.adapter_layout is None else self._shards(self.adapter_layout)

    def _shards(self, layout: ckpt.Layout) -> Shards:
        pairs = zip(self.chunks, self.places, strict=True)
        return Shards(layout, [(place, stored_tensors(chunk, place, layout)) for chunk, place in pairs])

    @contextmanager
    def decoding(self, options: CacheOptions) -> Iterator[Decoding]:
        """See `Engine`; inside, Megatron's global state is this grid's."""
        options.require_parallel("megatron")
        # The interleaved schedule needs as many micro-batches as stages.
        empty: list[list[int]] = [[]] * (self.micro_batches_multiple_of - 1)
        fillers = pack_micro_batches([], empty, multiple_of=self.tokens_multiple_of, device=self.grid.device)
        with self.entered() as megatron, torch.no_grad():
            caches = options.build([chunk.new_cache for chunk in self.chunks], self.grid)
            forward = partial(self._next_logits, megatron, fillers)
            yield Decoding(caches, forward, options.exact, stages=self.grid.group("pp"))

    def _next_logits(
        self,
        megatron: MegatronGrid,
        fillers: Sequence[PackedSequence],
        packed: PackedSequence,
        caches: Sequence[SequenceCache],
        *,
        logits: bool,
        visual: Visual = (),
    ) -> Tensor | None:
        """Continue the caches' sequences; return the logits after each sequence on the last stage."""
        outputs = run_schedule(
            self.chunks, [packed, *fillers], megatron, next_token=True, caches=caches, broadcast=False
        )
        result = outputs[0] if outputs else None
        assert result is None or isinstance(result, Tensor)
        return result


def check_device(device: torch.device) -> None:
    """Raise ValueError unless Megatron-Core computes on `device`."""
    current = megatron_device()
    if current is None or device.type != current.type:
        raise ValueError(
            f"backend='megatron' does not compute on device={str(device)!r}; use a GPU, or, for tests and "
            "demonstrations on a CPU, enter megatron_utils.testing.cpu_stand_in() around everything"
        )
    if device.index not in (None, current.index):
        raise ValueError(f"{device} is not the current device; call torch.cuda.set_device({device.index}) first")


def _outputs(output: LogProbs | Tensor) -> Outputs:
    if isinstance(output, Tensor):
        return (output,) if output.dim() == 1 else output.unbind(1)
    assert output.entropy is not None
    return output.log_probs, output.entropy


class ChunkedLayout(ckpt.Layout):
    """A layout with the chunk in its local names: `chunk1.decoder.layers.0...`.

    Megatron-Core counts layers inside each chunk, so names repeat between the chunks of a rank; a training checkpoint
    needs one name per tensor.
    """

    @classmethod
    def of(cls, layout: ckpt.Layout) -> ChunkedLayout:
        """Return the same layout with such names."""
        return cls(**{field.name: getattr(layout, field.name) for field in fields(layout) if field.init})

    def at(self, place: ckpt.Place) -> dict[str, ckpt.Block]:
        """Return the local tensors of `place`."""
        return {local_name(name, place): block for name, block in super().at(place).items()}


def local_name(name: str, place: ckpt.Place) -> str:
    """Return the name of a chunk's tensor among all tensors of a rank."""
    chunk, chunks = place.vpp
    return name if chunks == 1 else f"chunk{chunk}.{name}"


def places_of(megatron: MegatronGrid, virtual_stages: int) -> list[ckpt.Place]:
    """Return the place of each chunk of this rank."""
    groups = megatron.groups
    axes = {"tp": groups.tp, "pp": groups.pp, "ep": groups.ep, "etp": groups.expt_tp}
    coordinates = {axis: (group.rank(), group.size()) for axis, group in axes.items()}
    return [ckpt.Place(**coordinates, vpp=(number, virtual_stages)) for number in range(virtual_stages)]


def stored_tensors(chunk: PackedGPTModel, place: ckpt.Place, layout: ckpt.Layout) -> dict[str, Tensor]:
    """Return the tensors of a chunk that a checkpoint holds.

    For the layout of adapters these are adapters and the value head, else the other parameters, the routers' biases and
    carried tensors.
    """
    # Megatron-Core 0.19 stores the parameters of Mamba-2's convolution by the names of a module.
    parameters = {local_name(_MODULE.sub(r"conv1d.\1", name), place): x for name, x in chunk.named_parameters()}
    if isinstance(layout, ckpt.AdapterLayout):
        return {name: parameters[name] for name in layout.at(place) if name in parameters}
    tensors = {name: x for name, x in parameters.items() if ".lora." not in name}
    for name, buffer in chunk.named_buffers():
        if name.endswith("router.expert_bias") or name in layout.carried:
            tensors[local_name(name, place)] = buffer
    return tensors
